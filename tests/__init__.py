# SPDX-License-Identifier: Apache-2.0
"""A package, so that `tests.helpers` is this one, whatever is in site-packages."""
