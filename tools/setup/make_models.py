# SPDX-License-Identifier: Apache-2.0
"""Makes the models of model_recipes.py in the cache folder, once.

A model is built in a temporary folder beside its place and renamed when complete, so
that what is found under its name is whole, whatever was interrupted. A stamp in it
holds a digest of its recipe: a changed recipe builds it anew. Two processes do not
build at the same time; the second waits for the first.

The folder is NWOR_CACHE, by default $XDG_CACHE_HOME/vllm-nwor or ~/.cache/vllm-nwor;
models lie in its sub-folder `models`. Delete it to start over. Exit status: 0 done,
1 a model could not be made, 2 wrong arguments, 130 interrupted.
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
    """NWOR_CACHE, else the user's cache folder; it need not exist."""
    if chosen := os.environ.get("NWOR_CACHE"):
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-nwor"


def model_path(name: str) -> Path:
    """Where the model of this name lies, or will lie. KeyError: no such model."""
    return cache_dir() / "models" / RECIPES[name].name


def digest(recipe: Recipe) -> str:
    """A digest of all that determines a model's files, those it needs included."""
    parts = {"version": RECIPES_VERSION, "name": recipe.name, "spec": recipe.spec}
    parts["needs"] = [digest(RECIPES[name]) for name in recipe.needs]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def is_current(recipe: Recipe, models: Path) -> bool:
    """Whether this recipe's model is in `models`, every file with its size."""
    path = models / recipe.name
    try:
        stamp = json.loads((path / STAMP).read_text())
        sizes = {name: (path / name).stat().st_size for name in stamp["files"]}
    except FileNotFoundError:
        return False
    return stamp["recipe"] == digest(recipe) and sizes == stamp["files"]


def build(recipe: Recipe, models: Path) -> Path:
    """Makes one model in `models` (its needs must be there); returns its folder.

    Leaves either the complete model or what was there before.
    """
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
    """Held by the one process that builds; says so while it waits for another. What a
    killed one left is removed."""
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
    """Makes those of the models (and their needs) that are not there yet."""
    models = cache_dir() / "models"
    wanted = dict.fromkeys(n for name in names for n in (*RECIPES[name].needs, name))
    recipes = [RECIPES[name] for name in wanted]
    if not all(is_current(recipe, models) for recipe in recipes):
        with build_lock(models):
            # Another process may have made some meanwhile.
            for recipe in (one for one in recipes if not is_current(one, models)):
                started = time.monotonic()
                path = build(recipe, models)
                megabytes = sum(file.stat().st_size for file in path.iterdir()) / 1e6
                took = f"{megabytes:.1f} MB, {time.monotonic() - started:.1f} s"
                print(f"models: {recipe.name}, {recipe.summary}: {took}")
    print(f"models: {len(recipes)} up to date in {models}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = {"choices": list(RECIPES), "metavar": "NAME"}
    text = "make this one and what it needs; may be given several times"
    parser.add_argument("--only", action="append", help=text, **names)
    parser.add_argument("--path", help="print where this one lies, and stop", **names)
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
        print("models: interrupted; nothing half-made was kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
