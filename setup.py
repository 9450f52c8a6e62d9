# SPDX-License-Identifier: Apache-2.0
"""Adds the native library to the package; everything else is in pyproject.toml.

The library registers its ops with torch when it is loaded and has no Python symbols,
so one file serves every Python 3: the wheel is tagged py3-none-<platform>. CMake builds
it (tools/native.py), CUDA included when nvcc is found or NWOR_CUDA=ON.
"""

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))
import native  # noqa: E402


class CleanBuild(build):
    """Starts from an empty staging directory: no deleted module gets into a wheel."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuildExt(build_ext):
    """Has CMake build `_nwor_C.so`, under that name whatever the Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1]) / native.LIBRARY)

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        native.build(target.parent, build_root=ROOT / "build")


class PlatformWheel(bdist_wheel):
    """Any Python 3 of this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[Extension("vllm_nwor._nwor_C", sources=[])],
    cmdclass={
        "build": CleanBuild,
        "build_ext": CMakeBuildExt,
        "bdist_wheel": PlatformWheel,
    },
    options={"build": {"build_base": "build/setuptools"}},
)
