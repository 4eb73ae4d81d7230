"""Arguments of Megatron's runs that mjax reads, or that do not change what a trained model computes.

The names are from the versions of 2020 to megatron-core 0.19; * stands for any characters. Names of absent parts, such
as `mamba_*`, are harmless because `arguments.py` rejects the switch of the part, which no pattern may match.
"""

import re
from fnmatch import translate

HARMLESS = re.compile(
    "|".join(
        translate(name)
        for name in """
        num_layers hidden_size ffn_hidden_size padded_vocab_size max_position_embeddings num_attention_heads kv_channels
        num_query_groups hidden_dropout attention_dropout init_method_std norm_epsilon layernorm_epsilon openai_gelu
        onnx_safe bias_gelu_fusion rotary_base rotary_percent use_rope_scaling rope_scaling_factor
        rotary_seq_len_interpolation_factor add_qkv_bias encoder_num_layers moe_ffn_hidden_size moe_router_topk
        moe_router_score_function moe_router_pre_softmax moe_aux_loss_coeff moe_router_topk_scaling_factor
        moe_router_num_groups moe_router_group_topk moe_router_load_balancing_type moe_shared_expert_intermediate_size
        moe_z_loss_coeff moe_expert_capacity_factor moe_layer_freq

        *_parallel_size *_parallel_sizes *_num_weight_shards data_parallel_* rank local_rank world_size nnodes
        distributed_* DDP_impl ddp_* use_*_ddp *fsdp* *_dp_sharding_strategy num_distributed_optimizer_instances nccl_*
        tp_comm_* cp_comm_type *_comm_backend overlap_* *_overlap ep_overlap_* delay_* align_* *_p2p_*
        use_ring_exchange_p2p scatter_gather_tensors_in_pipeline sequence_parallel hybrid_context_parallel
        *_process_group* enable_full_sharding_in_hsdp *gtp_weight_remat_size expert_parallel create_all_gather_group
        use_sharp sharp_enabled_group high_priority_* disable_symmetric_registration suggested_communication_unit_size
        async_tensor_model_parallel_allreduce *_pipeline_num_layers num_layers_in_*_pipeline_stage
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank pipeline_model_parallel_*
        account_for_*_in_pipeline_split standalone_embedding_stage microbatch_group_size_* num_microbatches_*
        variable_seq_lengths use_tp_pp_dp_mapping fake_process_group deallocate_pipeline_outputs

        fp16 bf16 fp32_allreduce fp32_residual_connection fp16_lm_cross_entropy *_dtype autocast* enable_autocast fp8
        fp8_* *_fp8_* fp4 fp4_* first_last_layers_bf16 num_layers_at_*_in_bf16 disable_bf16_reduced_precision_matmul
        grad_* gradient_* accumulate_allreduce_grads_in_fp32 attention_softmax_in_fp32 apply_query_key_layer_scaling
        te_precision_config_file te_rng_tracker use_te_rng_tracker kitchen_* tp_only_amax_red

        optimizer optimizer_* *_optimizer distrib_optim_* reuse_grad_buf_* use_layer_wise_* adam_* *muon_* lion_* soap_*
        sgd_momentum lr lr_* min_lr decoupled_* head_lr_mult warmup weight_decay weight_decay_incr_style
        start_weight_decay end_weight_decay no_weight_decay_cond_type apply_wd_to_qk_layernorm clip_grad qk_clip*
        override_* use_checkpoint_* loss_scale loss_scale_window initial_loss_scale min_loss_scale min_scale hysteresis
        dynamic_loss_scale

        train_* *batch_size step_batch_size_schedule seed exit_* skip_train skipped_* iterations_to_skip eval_*
        start_eval_* full_validation decrease_batch_size_if_needed multiple_validation_sets validation_set_names
        iteration curr_iteration consumed_* do_train do_valid do_test finetune pretrained_checkpoint manual_gc*
        phase_transition_iterations rerun_mode result_rejected_* error_injection_* fault_injector_* inprocess_*
        *ft_package ft_* calc_ft_timeouts adlr_* run_workload_inspector_server straggler_* disable_straggler_on_startup
        check_* test_mode eod_mask_loss cross_entropy_* calculate_per_token_loss mask_prob mask_factor mask_type
        short_seq_prob num_floating_point_operations_so_far freeze_all_layers init_method init_method_xavier_uniform
        embedding_init_method* output_layer_init_method perform_initialization use_cpu_initialization
        init_model_with_meta_device lazy_mpu_init

        save save_* load load_* no_save_* no_load_* ckpt_* *_ckpt_* async_* non_persistent_* dist_ckpt* use_dist_ckpt*
        replication replication_* verify_integrity stream_ckpt_dequant strict_fsdp_* dump_param_to_param_group_map
        metadata_path hetereogenous_dist_checkpoint use_mp_args_from_checkpoint_args use_persistent_ckpt_worker
        use_tokenizer_model_from_checkpoint_args object_storage_cache_path

        data_* *_data_path per_split_data_args_path per_dataset_* num_dataset_builder_threads mid_level_dataset_surplus
        dataloader_* split seq_length *_seq_length max_seqlen_* reset_position_ids reset_attention_mask
        create_attention_mask_in_dataloader num_workers mmap_* mock_data sft sft_* fim_* vocab_* pad_vocab_size
        make_vocab_size_divisible_by tokenizer_* merge_file tiktoken_* null_tokenizer_* special_tokens use_pin_memory
        legacy_tokenizer chat_template trust_remote_code allow_ambiguous_pad_tokens logits_save_* logits_load_*
        sample_rate offset_sampling_seed_by_dp_rank

        *_fusion *_fusion_impl use_flash_attn flash_* attention_backend transformer_impl use_te_activation_func
        *cuda_graph* recompute_* checkpoint_* activations_checkpoint_* *_activations *offload* nvtx_ranges
        deterministic_mode batch_invariant_mode defer_embedding_wgrad_compute wgrad_deferral_limit persist_layer_norm
        no_persist_layer_norm memory_efficient_layer_norm fused_residual_rmsnorm fused_single_qkv_rope disable_jit_fuser
        use_fused_weighted_squared_relu use_transformer_engine_op_fuser clone_scatter_output_in_embedding
        mlp_chunks_for_* empty_unused_memory_level pin_* use_legacy_models use_mcore_models *deprecated* yaml_cfg
        enable_experimental model_type mamba_* use_mamba_mem_eff_path enable_msc disable_*_cache

        log_* *_log_interval logging_level tensorboard_* wandb_* *one_logger* timing_log_* profile profile_* *_profiler*
        record_* memory_snapshot_path app_tag_* barrier_with_L1_time config_logger_dir flight_recorder_*
        gpu_sniff_test_* report_topk_accuracies

        inference_* enable_chunked_prefill decode_only_* *_for_prefill num_speculative_tokens refit_method
        max_tokens_to_oom output_bert_embeddings use_legacy_static_engine symmetric_ar_type rl_* grpo_* langrl_*
        perform_rl_step

        bert_* ict_* biencoder_* retriever_* indexer_* query_in_block_prob embedding_path use_one_sent_docs vision_*
        dino_* swin_* img_* patch_dim num_channels num_classes classes_fraction iter_per_epoch retro_* dsa_*
        linear_num_* linear_key_* linear_value_* linear_conv_* mtp_* mup_* relative_attention_* yarn_* q_lora_rank
        kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim mscale mscale_all_dim rotary_scaling_factor rope_type
        cache_mla_latents mla_* original_max_position_embeddings beta_fast beta_slow

        moe_token_dispatcher_type moe_token_drop_policy moe_flex_* moe_enable_deepep moe_enable_routing_replay
        moe_deepep_* moe_hybridep_* moe_ncclep_* moe_paged_stash* moe_permute_* moe_per_layer_logging
        moe_routing_trace_* moe_upcycling_* moe_use_upcycling moe_layer_recompute moe_router_dtype moe_router_fusion
        moe_router_padding_* moe_pad_* moe_shared_expert_overlap moe_single_grouped_* moe_grouped_gemm
        moe_use_legacy_grouped_gemm moe_router_bias_update_rate
        """.split()  # noqa: SIM905
    )
)
