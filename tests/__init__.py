# SPDX-License-Identifier: Apache-2.0
"""Tests. A package, so that they can import `tests.helpers` under any name that
another distribution may have put in site-packages."""
