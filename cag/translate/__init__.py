"""Translators: maps from one model's canonical KV to another's."""

from cag.translate.base import TRANSLATORS, Translator, load_translator
from cag.translate.baselines import SharedLatent, SingleProjection
from cag.translate.config import TranslatorConfig
from cag.translate.finding import find_translator
from cag.translate.mixture import Mixture
from cag.translate.ridge import Ridge

__all__ = [
    "TRANSLATORS",
    "Mixture",
    "Ridge",
    "SharedLatent",
    "SingleProjection",
    "Translator",
    "TranslatorConfig",
    "find_translator",
    "load_translator",
]
