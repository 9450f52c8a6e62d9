# SPDX-License-Identifier: Apache-2.0
"""Makes the models of model_recipes.py in the cache folder, once.

A model is built in a temporary folder and renamed when complete, so that an interrupted
build leaves no partial model. Its stamp has a digest of its recipe: if the recipe
changes it is built again. A second process waits for the first.

Models are in `models` of NWOR_CACHE, by default $XDG_CACHE_HOME/vllm-nwor or
~/.cache/vllm-nwor. Exit status: 0 done, 1 a model could not be made, 2 wrong arguments,
130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.setup.model_recipes import RECIPES, RECIPES_VERSION, Recipe, RecipeError

STAMP, TEMPORARY = "nwor_model.json", ".tmp-"


def cache_dir() -> Path:
    """NWOR_CACHE, or the user's cache folder; it need not exist."""
    if chosen := os.environ.get("NWOR_CACHE"):
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-nwor"


def model_path(name: str) -> Path:
    """The folder of the model of this name. KeyError: no such model."""
    return cache_dir() / "models" / RECIPES[name].name


def digest(recipe: Recipe) -> str:
    """A digest of everything that determines a model's files, with its needs."""
    parts = {"version": RECIPES_VERSION, "name": recipe.name, "spec": recipe.spec}
    parts["needs"] = [digest(RECIPES[name]) for name in recipe.needs]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def is_current(recipe: Recipe, models: Path) -> bool:
    """Whether `models` has this recipe's model, each file with its size."""
    path = models / recipe.name
    try:
        stamp = json.loads((path / STAMP).read_text())
        sizes = {name: (path / name).stat().st_size for name in stamp["files"]}
    except FileNotFoundError:
        return False
    return stamp["recipe"] == digest(recipe) and sizes == stamp["files"]


def build(recipe: Recipe, models: Path) -> Path:
    """Makes one model in `models`, which has its needs; returns its folder. A failure
    leaves the previous model."""
    target = models / recipe.name
    with tempfile.TemporaryDirectory(dir=models, prefix=TEMPORARY) as folder:
        new = Path(folder) / "new"
        new.mkdir()
        recipe.make(recipe, new, models)
        files = {path.name: path.stat().st_size for path in new.iterdir()}
        stamp = {"recipe": digest(recipe), "files": files}
        (new / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
        if target.exists():
            target.rename(Path(folder) / "old")
        new.rename(target)
    return target


@contextlib.contextmanager
def build_lock(models: Path) -> Iterator[None]:
    """The lock of the process that builds. Waits for another one, with a message, and
    removes what a killed one left."""
    models.mkdir(parents=True, exist_ok=True)
    with open(models / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("models: waiting for another process that makes them", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        for path in models.glob(f"{TEMPORARY}*"):
            shutil.rmtree(path)
        yield


def make(names: Sequence[str]) -> None:
    """Makes the missing models and their needs."""
    models = cache_dir() / "models"
    wanted = dict.fromkeys(n for name in names for n in (*RECIPES[name].needs, name))
    recipes = [RECIPES[name] for name in wanted]
    if not all(is_current(recipe, models) for recipe in recipes):
        with build_lock(models):
            # Another process may have made some in the meantime.
            for recipe in (one for one in recipes if not is_current(one, models)):
                started = time.monotonic()
                path = build(recipe, models)
                megabytes = sum(file.stat().st_size for file in path.iterdir()) / 1e6
                took = f"{megabytes:.1f} MB, {time.monotonic() - started:.1f} s"
                print(f"models: {recipe.name}, {recipe.summary}: {took}")
    print(f"models: {len(recipes)} up to date in {models}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = {"choices": RECIPES, "metavar": "NAME"}
    text = "make this one and what it needs; may be given several times"
    parser.add_argument("--only", action="append", help=text, **names)
    parser.add_argument("--path", help="print this model's folder only", **names)
    args = parser.parse_args(argv)
    if args.path:
        print(model_path(args.path))
        return 0
    try:
        make(args.only or list(RECIPES))
    except RecipeError as error:
        print(f"models: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("models: interrupted; no partial model was kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
