# SPDX-License-Identifier: Apache-2.0
"""The only part that knows vLLM: imports it, wraps its functions, reads its objects.

`ledger` has all that is touched, `facts` what else is relied on, `backends` and
`versions` what is known of attention backends and releases. `runner`, `runner_v1` and
`runner_v2` build a Step and call observers (step.py); `caches`, `layers` and `staging`
read a runner's caches, `scheduled` the scheduler's output; `outputs` attaches what a
step reports. In other
processes: `engine_core` and `info`, `scheduler`, `front_end`. `worker` and `connectors`
are there for observers that follow more than steps.

Nothing here knows an observer by name: `plugin` hands the builders in (`Builder`).
"""
