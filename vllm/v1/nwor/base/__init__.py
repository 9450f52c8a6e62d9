# SPDX-License-Identifier: Apache-2.0
"""What every other part may use: errors, wrappers on functions, a step's payload."""
