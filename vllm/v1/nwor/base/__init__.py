# SPDX-License-Identifier: Apache-2.0
"""Shared by all other parts: errors, function wrappers, a step's payload."""
