# SPDX-License-Identifier: Apache-2.0
"""Settings for all tests: engines run in process, offline, and NWOR starts off."""

from __future__ import annotations

from tests.helpers import environment

environment.prepare()
