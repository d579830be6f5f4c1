"""Documents: find files, load them as text, split the text into passages."""

from cag.documents.loaders import LOADERS, Document, find_files, load, parse
from cag.documents.splitter import Span, split

__all__ = ["LOADERS", "Document", "Span", "find_files", "load", "parse", "split"]
