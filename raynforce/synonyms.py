"""What other libraries call things, and what they are called here. Data alone, read only when a word is not known.

The words are those of Stable-Baselines3 and its zoo, RLlib, CleanRL, Tianshou, Sample Factory, Acme and Gymnasium.
Case, hyphens and underscores make no difference: `--n-envs` is `n_envs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Here(NamedTuple):
    """A setting of ours."""

    path: str
    note: str = ""
    """What is different about it, if anything is."""


_STEPS = "in environment steps"
_PRODUCT = "a batch is sampling.samplers x sampling.envs x sampling.fragment steps"
_LIST = "a list of widths, such as [64, 64]"

SETTINGS: Mapping[str, Sequence[Here]] = {
    # Where there are several, the first one that the algorithm has is meant.
    # -- how long, and what is told of it
    "total_timesteps timesteps n_timesteps num_timesteps max_timesteps total_steps max_steps total_env_steps "
    "num_env_steps train_for_env_steps env_steps stop_timesteps max_num_actor_steps": [
        Here("steps", "of all environments together")
    ],
    "total_frames num_frames frames": [Here("steps", "in steps of the environment, whatever it skips")],
    "epoch max_epochs max_epoch num_iterations stop_iters training_iterations": [Here("steps", _STEPS)],
    "step_per_epoch epoch_num_steps": [Here("eval.every", "the run is as long as `steps`, without epochs")],
    "stop_reward reward_threshold target_reward stop_value": [Here("target", "a mean return of greedy episodes")],
    "eval_freq eval_interval evaluation_interval eval_frequency": [Here("eval.every", _STEPS)],
    "n_eval_episodes num_eval_episodes eval_episodes evaluation_duration episode_per_test": [Here("eval.episodes")],
    "n_eval_envs num_eval_envs test_num num_test_envs n_test_envs evaluation_num_env_runners evaluation_num_workers": [
        Here("eval.envs", "they are stepped by one evaluator")
    ],
    "save_freq save_interval checkpoint_freq checkpoint_frequency checkpoint_interval": [
        Here("checkpoint.every", _STEPS)
    ],
    "save_every_sec": [Here("checkpoint.seconds")],
    "keep_checkpoints keep_checkpoints_num num_to_keep": [Here("checkpoint.keep")],
    "log_interval log_freq logging_interval report_interval": [Here("log_every", _STEPS)],
    "random_seed rng_seed": [Here("seed")],
    # -- environments and samplers
    "env_id env_name environment": [Here("env")],
    "env_config env_kwargs env_params": [Here("env_args")],
    "max_episode_steps max_ep_len max_episode_length episode_length time_limit": [
        Here("env_args", "for a gymnasium id, env_args.max_episode_steps")
    ],
    "n_envs num_envs n_env num_env num_environments training_num n_training_envs num_training_envs": [
        Here("sampling.envs", "of each sampler")
    ],
    "num_envs_per_env_runner num_envs_per_worker envs_per_worker": [Here("sampling.envs")],
    "num_env_runners num_rollout_workers num_workers n_workers workers num_actors num_processes n_cpu": [
        Here("sampling.samplers", "at least 1, which --runtime inline keeps in this process")
    ],
    "vec_env_cls vec_env_type vectorization_mode": [
        Here("sampling.parallel", "processes for SubprocVecEnv or async, no for DummyVecEnv or sync")
    ],
    "n_steps": [
        Here("algorithm.n_step", "of n-step returns"),
        Here("sampling.fragment", "steps of each environment"),
    ],
    "num_steps rollout rollout_length rollout_fragment_length rollout_steps unroll_length num_steps_per_env": [
        Here("sampling.fragment", "steps of each environment")
    ],
    "step_per_collect collection_step_num_env_steps frames_per_batch": [
        Here("sampling.fragment", "steps of each environment, not of all together")
    ],
    "train_batch_size train_batch_size_per_learner": [
        Here("algorithm.batch_size"),
        Here("sampling.fragment", _PRODUCT),
    ],
    "serial_mode": [Here("runtime", "inline has all in one process")],
    "async_rl async_mode": [Here("topology", "async, or replay for dqn")],
    "max_policy_lag": [Here("stream.max_lag", "in policy versions, on topology async")],
    # -- every algorithm
    "lr step_size": [Here("algorithm.learning_rate")],
    "anneal_lr lr_schedule lr_decay linear_lr_decay use_linear_lr_decay": [
        Here("algorithm.anneal_learning_rate", "true lets it fall linearly to zero")
    ],
    "adam_eps optimizer_eps opt_eps": [Here("algorithm.adam_epsilon")],
    "grad_clip max_gradient_norm grad_norm_clipping gradient_clip clip_grad_norm clip_grad gradient_clip_norm": [
        Here("algorithm.max_grad_norm")
    ],
    "discount discount_factor discounting": [Here("algorithm.gamma")],
    # -- policy gradients
    "batch_size minibatch_size sgd_minibatch_size": [
        Here("algorithm.minibatch_size", "of one optimiser step"),
        Here("algorithm.batch_size", "of one optimiser step"),
        Here("sampling.fragment", "each gradient is of one fragment: sampling.envs x sampling.fragment steps"),
    ],
    "num_minibatches num_mini_batch num_batches_per_epoch n_minibatches": [
        Here("algorithm.minibatch_size", "how large they are, not how many")
    ],
    "n_epochs num_epochs num_sgd_iter update_epochs ppo_epochs ppo_epoch repeat_per_collect noptepochs k_epochs "
    "update_step_num_repetitions": [Here("algorithm.epochs", "passes over each batch")],
    "clip_range clip_param clip_coef clip_eps clip_epsilon clip_ratio eps_clip ppo_clip_ratio": [
        Here("algorithm.clip")
    ],
    "clip_range_vf vf_clip_param ppo_clip_value": [Here("algorithm.clip_value")],
    "clip_vloss value_clip clip_value_loss": [Here("algorithm.clip_value", "a distance, such as 0.2; null is off")],
    "lambda lam gae_lambda gae_lam": [Here("algorithm.gae_lambda"), Here("algorithm.vtrace_lambda")],
    "ent_coef entropy_coeff entropy_coefficient entropy_cost entropy_weight exploration_loss_coeff": [
        Here("algorithm.entropy_coef")
    ],
    "vf_coef vf_loss_coeff value_coeff value_loss_coef value_loss_coeff value_loss_weight critic_coef baseline_cost": [
        Here("algorithm.value_coef")
    ],
    "norm_adv normalize_advantages advantage_normalization standardize_advantages": [
        Here("algorithm.normalize_advantage")
    ],
    "kl_target kl_coeff use_kl_loss": [
        Here("algorithm.target_kl", "it ends a round's epochs early; there is no KL penalty")
    ],
    "vtrace_clip_rho_threshold vtrace_rho clip_rho_threshold": [Here("algorithm.rho_clip")],
    "vtrace_c": [Here("algorithm.c_clip")],
    "init_log_std initial_log_std": [Here("algorithm.log_std_init")],
    # -- replay
    "buffer_capacity capacity memory_size replay_size replay_buffer_size replay_capacity max_replay_size": [
        Here("algorithm.buffer_size")
    ],
    "learning_start start_timesteps warmup_steps min_replay_size num_steps_sampled_before_learning_starts": [
        Here("algorithm.learning_starts", _STEPS)
    ],
    "train_freq train_frequency gradient_steps training_intensity update_per_step updates_per_step utd utd_ratio "
    "replay_ratio": [Here("algorithm.samples_per_insert", "batch size x updates / environment steps")],
    "tau polyak polyak_tau": [Here("algorithm.target_tau", "with algorithm.target_update=soft")],
    "target_update_interval target_network_frequency target_network_update_freq target_update_freq "
    "target_update_period target_update_frequency": [Here("algorithm.target_every", "in updates, not in steps")],
    "exploration_fraction": [Here("algorithm.epsilon_fraction")],
    "epsilon_timesteps epsilon_decay eps_decay exploration_steps epsilon_decay_steps": [
        Here("algorithm.epsilon_fraction", "a share of the run")
    ],
    "exploration_initial_eps start_e eps_start initial_epsilon epsilon_initial eps_train": [
        Here("algorithm.epsilon_start")
    ],
    "exploration_final_eps end_e eps_end final_epsilon epsilon_final eps_train_final eps_min epsilon_min": [
        Here("algorithm.epsilon_end")
    ],
    "double_q double_dqn is_double use_double": [Here("algorithm.double")],
    "estimation_step nstep multi_step": [Here("algorithm.n_step")],
    "prioritized_replay prioritized_replay_buffer use_per": [Here("algorithm.prioritized")],
    "prioritized_replay_alpha per_alpha priority_exponent": [Here("algorithm.priority_alpha")],
    "prioritized_replay_beta prioritized_replay_beta0 per_beta importance_sampling_exponent": [
        Here("algorithm.priority_beta")
    ],
    "replay_buffer_config replay_buffer_kwargs": [
        Here("algorithm.buffer_size", "and algorithm.prioritized; each is a setting of its own")
    ],
    # -- the network
    "net_arch hidden_sizes hidden_layers hidden_dims hidden_units fcnet_hiddens layer_sizes mlp_layers "
    "encoder_mlp_layers": [Here("network.hidden", _LIST)],
    "hidden_size hidden_dim": [Here("network.hidden", _LIST)],
    "policy policy_kwargs model model_config": [
        Here("network.hidden", "with network.activation, network.conv and network.factory; images get convolutions")
    ],
    "activation_fn fcnet_activation nonlinearity": [Here("network.activation")],
    "conv_filters cnn_layers": [Here("network.conv", "as [[channels, kernel, stride], ...]")],
    "features_extractor features_extractor_class custom_model encoder": [
        Here("network.factory", "your own torch module as module:factory")
    ],
    "norm_obs normalize_observation normalize_observations normalize_input obs_norm observation_filter": [
        Here("network.normalize_obs", "true or false")
    ],
    # -- the learner, and where it is
    "norm_reward normalize_reward normalize_rewards normalize_returns rew_norm reward_normalization reward_scale": [
        Here("learner.scale_rewards", "true divides by the running deviation of returns")
    ],
    "cuda use_cuda gpu use_gpu": [Here("learner.device", "auto, cpu, cuda or cuda:N")],
    "num_threads n_threads torch_threads": [Here("learner.threads")],
    "num_gpus num_gpus_per_learner gpus": [Here("ray.learner_gpus", "for Ray; learner.device is what it uses")],
    "num_cpus_per_env_runner num_cpus_per_worker cpus_per_worker": [Here("ray.sampler_cpus")],
    "num_cpus_per_learner": [Here("ray.learner_cpus")],
    "restart_failed_env_runners recreate_failed_workers max_num_env_runner_restarts": [Here("faults.restarts")],
}

NONE: Mapping[str, str] = {
    # What there is nothing for, and what comes nearest, if anything does.
    "use_sde sde_sample_freq": "there is no state-dependent exploration (gSDE)",
    "use_lstm use_rnn use_recurrent lstm_cell_size rnn_size recurrence use_attention max_seq_len": (
        "networks have no memory; raynforce.envs.frames:stacked shows the newest observations together"
    ),
    "frame_stack n_stack num_stack": "stack frames in the environment: raynforce.envs.frames:stacked",
    "optimizer optimizer_class use_rms_prop rms_prop_eps weight_decay": "the optimiser is Adam, without weight decay",
    "num_learners num_learner_workers": "there is one learner",
    "num_policies policies policy_mapping_fn": "there is one agent, and one policy",
    "use_gae use_critic": "advantages always come from a critic; algorithm.gae_lambda=1 sums up rewards as they are",
    "with_vtrace use_vtrace": "V-trace is used wherever data is older than the policy",
    "dual_clip recompute_adv recompute_advantage": "PPO is the plain one, without this extension",
    "clip_rewards reward_clipping clip_reward": "clip rewards in the environment: gymnasium.wrappers.TransformReward",
    "noisy noisy_nets num_atoms v_min v_max num_quantiles": "dqn has no noisy networks and no distributions of values",
    "target_entropy policy_delay target_policy_noise target_noise_clip action_noise exploration_noise": (
        "it belongs to SAC, TD3 or DDPG, which raynforce does not have"
    ),
    "tensorboard_log log_dir train_dir save_dir output_dir local_dir storage_path exp_name experiment": (
        "all that a run writes is in one directory: --out DIR, or out= in Python"
    ),
    "verbose progress_bar": "progress is shown by default: --quiet, or progress= in Python",
    "framework": "networks are trained with torch",
}

VALUES: Mapping[str, str] = {
    # What may stand for a value of ours; "" is one that there is none of, whatever it is spelled like.
    "swish": "silu",
    "gelu selu celu leaky_relu prelu mish": "",
    "multiprocessing subproc subprocess": "process",
    "local": "inline",
    "synchronous": "sync",
    "asynchronous": "async",
}

_CONTINUOUS = "for continuous actions there is ppo, which is on-policy"
_ONE_AGENT = "there is one agent: nothing for several in one environment"
_MODEL = "nothing here learns a model of the environment"
_RECORDED = "nothing here learns from recorded data or demonstrations"
_EVOLUTION = "nothing here is an evolution strategy"
_MEMORY = "networks have no memory; raynforce.envs.frames:stacked shows the newest observations together"
_MEAN = "dqn learns the mean of returns, not their distribution"

ALGORITHMS: Mapping[str, str] = {
    # What comes nearest in purpose, if anything does.
    "sac td3 ddpg d4pg tqc redq droq crossq mpo vmpo naf discrete_sac": _CONTINUOUS,
    "a2c": "a3c on --topology sync is A2C",
    "trpo acktr ppo2 ppo1 ppg vpg": "ppo comes nearest",
    "pg reinforce": "a3c on --topology sync comes nearest; examples/own_algorithm.py is REINFORCE",
    "appo async_ppo": "ppo or impala on --topology async come nearest",
    "vtrace seed_rl": "impala, on --topology async or central",
    "acer ga3c": "impala or a3c come nearest",
    "apex apex_dqn": "dqn on --topology replay, with algorithm.prioritized=true, comes nearest",
    "rainbow": "dqn has these parts of it: algorithm.double, dueling, n_step and prioritized",
    "ddqn double_dqn": "dqn is double by default: algorithm.double",
    "dueling_dqn": "dqn, with algorithm.dueling=true",
    "per prioritized_dqn": "dqn, with algorithm.prioritized=true",
    "q_learning sarsa nfq simple_q": "dqn comes nearest",
    "c51 qrdqn iqn fqf": _MEAN,
    "r2d2 r2d3 ngu agent57 drqn recurrent_ppo ppo_lstm": _MEMORY,
    "qmix vdn mappo ippo maddpg coma qplex": _ONE_AGENT,
    "dreamer dreamer_v2 dreamer_v3 planet muzero efficientzero alphazero mbpo pets tdmpc tdmpc2 mbmpo": _MODEL,
    "bc marwil cql iql bcq crr awr awac td3_bc gail airl dqfd dt decision_transformer dagger sqil": _RECORDED,
    "es ars cem cma_es openai_es": _EVOLUTION,
    "her": "there is no hindsight replay; dqn replays what happened",
    "rnd icm": "there is no bonus for curiosity; algorithm.entropy_coef keeps ppo exploring",
    "maskable_ppo": "there are no action masks",
    "grpo dpo rlhf": "nothing here is made for language models",
}
