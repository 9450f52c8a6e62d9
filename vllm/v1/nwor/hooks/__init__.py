# SPDX-License-Identifier: Apache-2.0
"""The only part that knows vLLM: imports it, wraps its functions, reads its objects.

`ledger` lists everything that NWOR touches, `facts` everything else that it relies on,
`backends` and `versions` the known attention backends and releases. `runner`,
`runner_v1` and `runner_v2` build a Step and call observers (step.py). `caches`,
`layers` and `staging` read a runner's caches, `scheduled` the scheduler's output.
`outputs` attaches a step's report to its output. In other processes run `engine_core`,
`info`, `scheduler` and `front_end`. `worker` and `connectors` serve observers that
follow more than steps.

Nothing here knows an observer by name: `plugin` passes the builders (`Builder`).
"""
