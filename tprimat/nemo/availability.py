"""Find a recipe of NeMo, or name what is missing. Imports nothing heavy before it looks."""

from importlib import import_module
from typing import Any

from tprimat.core.errors import LaunchError
from tprimat.engines.nemo import INSTALL

RECIPES = "nemo.collections.llm.recipes"


def pretrain_recipe(name: str | None, model: str) -> Any:
    """Return the function `pretrain_recipe` of a NeMo recipe, such as llama31_8b.

    `from nemo.collections import llm` succeeds even when its recipes fail to import, and only logs it. Where the recipe is
    absent, its own module is imported once more to learn what is missing.

    Raises:
        LaunchError: no recipe is named, or it cannot be imported; names the missing module.
    """
    if name is None:
        raise LaunchError(
            f"The model {model} names no NeMo recipe.", where=f"models.{model}.nemo_recipe", fix="--engine megatron"
        )
    try:
        from nemo.collections import llm

        if not hasattr(llm, name):
            import_module(f"{RECIPES}.{name}")
    except ImportError as error:
        raise _missing(name, error) from error
    if not hasattr(llm, name):
        what = f"nemo.collections.llm has no recipe {name}."
        raise LaunchError(what, where=f"models.{model}.nemo_recipe", fix=INSTALL)
    return getattr(llm, name).pretrain_recipe


def _missing(recipe: str, error: ImportError) -> LaunchError:
    if error.name == f"{RECIPES}.{recipe}":
        what = f"NeMo has no recipe {recipe}."
        return LaunchError(what, why="Recipes are the modules of nemo.collections.llm.recipes.", fix="models.MODEL.nemo_recipe")
    what = f"NeMo's recipe {recipe} cannot be imported: {error}."
    return LaunchError(what, why=f"The module {error.name or 'above'} is missing or broken.", fix=INSTALL)
