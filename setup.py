# SPDX-License-Identifier: Apache-2.0
"""Adds the native library to the package; everything else is in pyproject.toml.

The library is a module of Python's limited API, so one file serves every Python from
3.11: the wheel is tagged cp311-abi3-<platform>. CMake builds it (tools/native.py), with
CUDA code if nvcc is found or NWOR_CUDA=ON.
"""

import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PACKAGE = "vllm_nwor"
# A new folder for each build: deleted modules do not get into a wheel.
STAGING = TemporaryDirectory()
sys.path.insert(0, str(ROOT / "tools"))
import native  # noqa: E402


class CMakeBuildExt(build_ext):
    """CMake builds `_nwor_C.so`, a file name that every Python finds."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1]) / native.LIBRARY)

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        native.build(target.parent)


class PlatformWheel(bdist_wheel):
    """Tags the wheel for any Linux whose glibc has the symbols that the library needs:
    manylinux_2_X, where 2.X is the newest version of a symbol, or 2.28, which the
    wheels of vLLM and torch need.

    The tag also promises that torch is all that is missing there; tests/unit/
    test_packaging.py has auditwheel check both.
    """

    OLDEST = 28

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        library = Path(self.bdist_dir) / PACKAGE / native.LIBRARY
        if library.is_file():  # an editable wheel has none
            # The library contains the version of each symbol, such as "GLIBC_2.17".
            needed = re.findall(rb"\0GLIBC_2\.(\d+)", library.read_bytes())
            if needed:
                tag = f"manylinux_2_{max(self.OLDEST, *map(int, needed))}_"
                platform = re.sub("^linux_", tag, platform)
        return python, abi, platform


setup(
    ext_modules=[Extension(f"{PACKAGE}._nwor_C", sources=[], py_limited_api=True)],
    cmdclass={
        "build_ext": CMakeBuildExt,
        "bdist_wheel": PlatformWheel,
    },
    options={
        "build": {"build_base": STAGING.name},
        "bdist_wheel": {"py_limited_api": "cp311"},
    },
)
