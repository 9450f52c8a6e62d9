# SPDX-License-Identifier: Apache-2.0
"""What our modules rely on in vLLM beyond the signatures in each LEDGER: what they
read, the shapes of what they get, the order of the calls between which they sit.

Data only: `source.py` compares it with the source of a vLLM. What releases may have or
not is no fact, or has alternatives. What several modules rely on is said once. An entry
begins with a place below `vllm`: a module; behind the colon a class in it; ".name": a
function of the place above. Then

    has      attributes; a|b: either; behind a colon the type that it is declared with
             or, where it is not declared, what is called for all that is assigned to it
    does     expressions in its code, calls with (): each for the first time behind the
             one before it; "!": the module makes this call nowhere else
    returns  the (last) names of the parts of the tuple returned, or of the one value
    takes    parameters, all of them; "...": others, too, that have defaults
"""

# Module of ours -> what it relies on.
FACTS = {
    "plugin": """
envs has environment_variables:dict
plugins has load_general_plugins
""",
    "runner": """
v1.worker.gpu_worker:Worker
.determine_available_memory does self.model_runner.profile_run()
.get_kv_cache_spec does self.model_runner.get_kv_cache_spec()
v1.core.sched.output:SchedulerOutput
    has scheduled_new_reqs:list scheduled_cached_reqs:CachedRequestData
v1.core.sched.output:CachedRequestData has resumed_req_ids:set
v1.core.sched.output:NewRequestData has req_id:str
""",
    "runner_v1": """
v1.worker.gpu_model_runner:GPUModelRunner
    has vllm_config device kv_cache_config compilation_config get_kv_cache_spec drafter
        execute_model_state max_num_reqs input_batch:InputBatch seq_lens:torch.zeros
        positions:torch.zeros input_ids:self._make_buffer
        query_start_loc:self._make_buffer
    does self.query_start_loc.gpu
.execute_model
    does self._update_states() self._prepare_inputs() self._build_attention_metadata()
        self._model_forward()!
._prepare_inputs
    does self.input_batch.block_table.commit_block_table()
        self.input_batch.block_table.compute_slot_mapping()
        self._calc_spec_decode_metadata()!
    does self._prepare_input_ids() self._calc_spec_decode_metadata()
._calc_spec_decode_metadata returns SpecDecodeMetadata
.sample_tokens
    does self._sample()! self.propose_draft_token_ids() self._bookkeeping_sync()
        self.finalize_kv_connector() AsyncGPUModelRunnerOutput()
v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput has _model_runner_output
v1.worker.gpu_input_batch:InputBatch
    has num_reqs req_ids num_computed_tokens_cpu token_ids_cpu vocab_size
        block_table:MultiGroupBlockTable
v1.worker.block_table:MultiGroupBlockTable has block_tables __getitem__
v1.worker.block_table:BlockTable
    has block_size does self.slot_mapping.gpu does self.block_table.gpu
v1.spec_decode.metadata:SpecDecodeMetadata
    has num_draft_tokens:list[int] logits_indices:torch.Tensor
        cu_num_sampled_tokens:torch.Tensor
v1.outputs:SamplerOutput has sampled_token_ids:torch.Tensor
""",
    "runner_v2": """
v1.worker.gpu.model_runner:GPUModelRunner
    has vllm_config device kv_cache_config compilation_config get_kv_cache_spec
        speculator attn_groups req_states max_num_reqs execute_model_state
        block_tables:BlockTables
.execute_model
    does self.finish_requests() self.add_requests() self.update_requests()
        self.block_tables.apply_staged_writes() self.prepare_inputs()
        self.prepare_attn()! self.model_state.prepare_attn()
        self.cudagraph_manager.run_fullgraph() self.model()
.prepare_attn
    does self.block_tables.gather_block_tables()
        self.block_tables.compute_slot_mappings()
    returns block_tables slot_mappings
.sample returns sampler_output num_sampled num_rejected
.sample_tokens
    does self.sample()! AsyncOutput() self.postprocess_sampled()
        self.speculator.propose()
v1.worker.gpu.async_utils:AsyncOutput has model_runner_output
v1.worker.gpu.input_batch:InputBatch
    has req_ids:list num_reqs:int num_tokens:int num_draft_tokens:int
        logits_indices:torch.Tensor cu_num_logits:torch.Tensor
        query_start_loc:torch.Tensor seq_lens:torch.Tensor idx_mapping:torch.Tensor
        idx_mapping_np:np.ndarray
        input_ids:torch.Tensor positions:torch.Tensor
v1.worker.gpu.states:RequestState has req_id_to_index all_token_ids:StagedWriteTensor
v1.worker.gpu.block_table:BlockTables
    has block_sizes|kernel_block_sizes input_block_tables
v1.worker.utils:AttentionGroup has backend does kernel_block_size
""",
    "discovery": """
config.vllm:VllmConfig
    has speculative_config parallel_config model_config scheduler_config
        kv_transfer_config max_concurrent_batches
config.parallel:ParallelConfig
    has pipeline_parallel_size:int prefill_context_parallel_size:int
        decode_context_parallel_size:int
config.model:ModelConfig has dtype enable_sleep_mode:bool enable_cumem_allocator:bool
config.scheduler:SchedulerConfig has max_num_seqs:int max_num_batched_tokens:int
config.speculative:SpeculativeConfig
    has method num_speculative_tokens:int use_eagle uses_draft_model
config.kv_transfer:KVTransferConfig
    has kv_connector kv_connector_module_path kv_connector_extra_config
config.compilation:CompilationConfig has static_forward_context:dict
v1.kv_cache_interface
    has AttentionSpec CrossAttentionSpec EncoderOnlyAttentionSpec MambaSpec
        UniformTypeKVCacheSpecs
v1.kv_cache_interface:MambaSpec has num_speculative_blocks:int
v1.kv_cache_interface:AttentionSpec
    has block_size:int page_size_bytes tokens_per_state|storage_block_size
v1.kv_cache_interface:UniformTypeKVCacheSpecs has kv_cache_specs:dict
v1.kv_cache_interface:KVCacheGroupSpec has layer_names kv_cache_spec
v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer has _draft_attn_layer_names
v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator has draft_attn_layer_names
model_executor.layers.attention.attention:Attention
    has kv_cache impl num_kv_heads head_size head_size_v
model_executor.layers.attention.mla_attention:MLAAttention
    has kv_cache impl kv_lora_rank qk_rope_head_dim does self._k_scale
v1.attention.backend:AttentionBackend has get_name
model_executor.layers.attention_layer_base:AttentionLayerBase has get_attn_backend
v1.attention.backend:MLAAttentionImpl
.do_kv_cache_update
    takes self kv_c_normed k_pe kv_cache slot_mapping kv_cache_dtype k_scale ...
v1.attention.backends.cpu_attn:CPUAttentionBackendImpl
.do_kv_cache_update takes self layer key value kv_cache slot_mapping
v1.attention.backends.flash_attn:FlashAttentionImpl
.do_kv_cache_update takes self layer key value kv_cache slot_mapping
v1.attention.backends.triton_attn:TritonAttentionImpl
    has kv_cache_dtype _k_scale_cache _v_scale_cache
.do_kv_cache_update takes self layer key value kv_cache slot_mapping
""",
    "engine_core": """
v1.engine.core:EngineCore
._initialize_kv_caches
    does self.model_executor.get_kv_cache_specs()
        self.model_executor.determine_available_memory() get_kv_cache_configs()
        generate_scheduler_kv_cache_config()
        self.model_executor.initialize_from_config()
v1.kv_cache_interface:KVCacheConfig
    has num_blocks:int kv_cache_tensors:list kv_cache_groups:list
        needs_kv_cache_zeroing
v1.kv_cache_interface:KVCacheTensor has size:int
v1.kv_cache_interface:KVCacheSpec has page_size_bytes max_memory_usage_bytes
config.model:ModelConfig has original_max_model_len
""",
    "info": """
v1.engine.core does EngineCoreReadyResponse()
v1.engine.core:EngineCoreProc does engine_index
v1.engine.core:EngineCore
._initialize_kv_caches does self.model_executor.initialize_from_config()
v1.engine.core_client:MPClient does self._apply_ready_response()
v1.worker.worker_base:WorkerWrapperBase has __getattr__ worker
""",
    "stats": """
v1.core.sched.scheduler:Scheduler
    has vllm_config log_stats num_sampled_tokens_per_step has_unfinished_requests
        requests kv_cache_manager kv_cache_config
.update_from_output does self.make_spec_decoding_stats() self.make_stats()
v1.core.sched.output:SchedulerOutput
    has scheduled_spec_decode_tokens:dict num_invalid_spec_tokens:dict
        num_scheduled_tokens:dict
v1.request:Request
    has num_computed_tokens num_in_flight_tokens num_tokens is_finished
        num_stale_output_tokens|async_tokens_to_discard
v1.core.kv_cache_manager:KVCacheManager has get_blocks coordinator
v1.core.kv_cache_coordinator:KVCacheCoordinator has single_type_managers
v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager has block_size
v1.core.kv_cache_manager:KVCacheBlocks has blocks
v1.core.kv_cache_utils:KVCacheBlock has block_id:int
v1.outputs:ModelRunnerOutput
    has req_ids:list req_id_to_index:dict sampled_token_ids:list
v1.engine:EngineCoreOutputs has outputs:list scheduler_stats
v1.engine:EngineCoreOutput has request_id:str new_token_ids:list finish_reason
v1.metrics.stats:SchedulerStats has spec_decoding_stats
v1.spec_decode.metrics:SpecDecodingStats
    has num_drafts:int num_draft_tokens:int num_accepted_tokens:int
v1.metrics.loggers:PrometheusStatLogger
    has _counter_cls _gauge_cls per_engine_labelvalues
.__init__ does unregister_vllm_metrics()
""",
    "audit.runner": """
v1.worker.gpu_worker:Worker has model_runner
v1.core.sched.output:SchedulerOutput has finished_req_ids:set
v1.core.sched.output:CachedRequestData
    has req_ids:list new_block_ids:list num_computed_tokens:list
v1.core.sched.output:NewRequestData
    has num_computed_tokens:int block_ids:tuple lora_request prompt_embeds
        mm_features:list
multimodal.inputs:MultiModalFeatureSpec
    has identifier:str mm_position:PlaceholderRange
multimodal.inputs:PlaceholderRange has offset:int length:int
lora.request:LoRARequest has lora_name:str lora_path:str
config.cache:CacheConfig
    has kv_cache_memory_bytes gpu_memory_utilization:float num_gpu_blocks_override
""",
    "audit.stats": """
v1.core.sched.scheduler:Scheduler does request.prefill_stats.set()
.schedule does self.connector.get_num_new_matched_tokens()!
._preempt_request does self._free_request_blocks() request.num_preemptions
v1.request:Request has cache_salt prefill_stats num_preemptions
v1.metrics.stats:PrefillStats has num_local_cached_tokens:int
""",
    "audit.offloading": """
distributed.kv_transfer has get_kv_transfer_group has_kv_transfer_group
v1.core.sched.output:SchedulerOutput has kv_connector_metadata
distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1
    has _vllm_config _connector_metadata
distributed.kv_transfer.kv_connector.v1.offloading_connector:OffloadingConnector
    has connector_worker
.start_load_kv does self._connector_metadata
distributed.kv_transfer.kv_connector.v1.offloading.worker:OffloadingConnectorWorker
    has _unsubmitted_store_jobs spec
.handle_preemptions does kv_connector_metadata.jobs_to_flush
.start_kv_transfers does metadata.load_jobs
v1.kv_offload.base:OffloadingSpec has blocks_per_chunk
v1.kv_offload.base:BlockIDsLoadStoreSpec has block_ids
v1.kv_offload.base:GPULoadStoreSpec has group_sizes block_indices
v1.kv_offload.cpu.spec:CPUOffloadingSpec
v1.kv_offload.tiering.spec:TieringOffloadingSpec
""",
}
