# SPDX-License-Identifier: Apache-2.0
"""The parts of bench_vllm.py, one noun a file.

    arguments                   what was asked
    prompts, models, settings   what vLLM is given
    engine                      runs of the same requests on one engine
    worker_extension            what the benches do inside vLLM's worker
    ab                          what a run gives; arms in pairs with a baseline, and how
                                sure a median is
    environment, summary        what goes to the JSON file
    report, templates, reach    text and Markdown of this and other results
    files                       writing whole or not at all

Not installed with the package; nothing in `vllm_nwor` imports it.
"""
