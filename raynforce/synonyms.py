"""What other libraries call things, and what they are called here. Data alone, read only when a word is not known.

The words are those of Stable-Baselines3 and its zoo, RLlib, CleanRL, Tianshou, Sample Factory, Acme and Gymnasium.
Case, hyphens and underscores make no difference: `--n-envs` is `n_envs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Here(NamedTuple):
    path: str
    note: str = ""  # what is different about it, if anything is


def _by_word(rows: str) -> dict[str, list[Here]]:
    """Of rows `setting (note): word word …`; one that is indented goes on with the row above."""
    found: dict[str, list[Here]] = {}
    for row in rows.replace("\n    ", " ").splitlines():
        head, _, words = row.rpartition(": ")
        path, _, note = head.partition(" (")
        for word in words.split():
            found.setdefault(word, []).append(Here(path, note.removesuffix(")")))
    return found


# Where a word is in several rows, the first setting that the algorithm has is meant.
SETTINGS: Mapping[str, list[Here]] = _by_word("""\
data (recorded episodes, for bc): input_ dataset dataset_id demonstrations demo_path demos offline_data
steps (of all environments together): total_timesteps timesteps n_timesteps num_timesteps max_timesteps total_steps
    max_steps total_env_steps num_env_steps train_for_env_steps env_steps stop_timesteps max_num_actor_steps
steps (in steps of the environment, whatever it skips): total_frames num_frames frames
steps (in environment steps): epoch max_epochs max_epoch num_iterations stop_iters training_iterations
eval.every (the run is as long as `steps`, without epochs): step_per_epoch epoch_num_steps
target (a mean return of greedy episodes): stop_reward reward_threshold target_reward stop_value
eval.every (in environment steps): eval_freq eval_interval evaluation_interval eval_frequency
eval.episodes: n_eval_episodes num_eval_episodes eval_episodes evaluation_duration episode_per_test
eval.envs (they are stepped by one evaluator): n_eval_envs num_eval_envs test_num num_test_envs n_test_envs
    evaluation_num_env_runners evaluation_num_workers
checkpoint.every (in environment steps): save_freq save_interval checkpoint_freq checkpoint_frequency
    checkpoint_interval
checkpoint.seconds: save_every_sec
checkpoint.keep: keep_checkpoints keep_checkpoints_num num_to_keep
log_every (in environment steps): log_interval log_freq logging_interval report_interval
seed: random_seed rng_seed
env: env_id env_name environment
env_args: env_config env_kwargs env_params
env_args (env_args.wrappers is a list of names): env_wrapper env_wrappers wrapper_class wrappers
env_args (for a gymnasium id, env_args.max_episode_steps): max_episode_steps max_ep_len max_episode_length
    episode_length time_limit
sampling.envs (of each sampler): n_envs num_envs n_env num_env num_environments training_num n_training_envs
    num_training_envs
sampling.envs: num_envs_per_env_runner num_envs_per_worker envs_per_worker
sampling.samplers (at least 1, which --runtime inline keeps in this process): num_env_runners num_rollout_workers
    num_workers n_workers workers num_actors num_processes n_cpu
sampling.parallel (processes for SubprocVecEnv or async, no for DummyVecEnv or sync): vec_env_cls vec_env_type
    vectorization_mode
algorithm.n_step (of n-step returns): n_steps
sampling.fragment (steps of each environment): n_steps num_steps rollout rollout_length rollout_fragment_length
    rollout_steps unroll_length num_steps_per_env
sampling.fragment (steps of each environment, not of all together): step_per_collect collection_step_num_env_steps
    frames_per_batch
algorithm.batch_size: train_batch_size train_batch_size_per_learner
sampling.fragment (a batch is sampling.samplers x sampling.envs x sampling.fragment steps): train_batch_size
    train_batch_size_per_learner
runtime (inline has all in one process): serial_mode
topology (async, or replay for dqn, sac and td3): async_rl async_mode
stream.max_lag (in policy versions, on topology async): max_policy_lag
algorithm.learning_rate: lr step_size
algorithm.anneal_learning_rate (linear or cosine lets it fall to zero): anneal_lr lr_schedule lr_decay linear_lr_decay
    use_linear_lr_decay
algorithm.gsde: use_sde
algorithm.gsde_every: sde_sample_freq
algorithm.rnd_coef: rnd intrinsic_reward_coef curiosity
algorithm.adam_epsilon: adam_eps optimizer_eps opt_eps
algorithm.max_grad_norm: grad_clip max_gradient_norm grad_norm_clipping gradient_clip clip_grad_norm clip_grad
    gradient_clip_norm
algorithm.gamma: discount discount_factor discounting
algorithm.minibatch_size (of one optimiser step): batch_size minibatch_size sgd_minibatch_size
algorithm.batch_size (of one optimiser step): batch_size minibatch_size sgd_minibatch_size
sampling.fragment (each gradient is of one fragment: sampling.envs x sampling.fragment steps): batch_size minibatch_size
    sgd_minibatch_size
algorithm.minibatch_size (how large they are, not how many): num_minibatches num_mini_batch num_batches_per_epoch
    n_minibatches
algorithm.epochs (passes over each batch): n_epochs num_epochs num_sgd_iter update_epochs ppo_epochs ppo_epoch
    repeat_per_collect noptepochs k_epochs update_step_num_repetitions
algorithm.clip: clip_range clip_param clip_coef clip_eps clip_epsilon clip_ratio eps_clip ppo_clip_ratio
algorithm.clip_value: clip_range_vf vf_clip_param ppo_clip_value
algorithm.clip_value (a distance, such as 0.2; null is off): clip_vloss value_clip clip_value_loss
algorithm.gae_lambda: lambda lam gae_lambda gae_lam
algorithm.vtrace_lambda: lambda lam gae_lambda gae_lam
algorithm.entropy_coef: ent_coef entropy_coeff entropy_coefficient entropy_cost entropy_weight exploration_loss_coeff
algorithm.value_coef: vf_coef vf_loss_coeff value_coeff value_loss_coef value_loss_coeff value_loss_weight critic_coef
    baseline_cost
algorithm.normalize_advantage: norm_adv normalize_advantages advantage_normalization standardize_advantages
algorithm.target_kl (it ends a round's epochs early; there is no KL penalty): kl_target kl_coeff use_kl_loss
algorithm.rho_clip: vtrace_clip_rho_threshold vtrace_rho clip_rho_threshold
algorithm.c_clip: vtrace_c
algorithm.log_std_init: init_log_std initial_log_std
algorithm.buffer_size: buffer_capacity capacity replay_size replay_buffer_size replay_capacity
    max_replay_size
algorithm.learning_starts (in environment steps): learning_start start_timesteps warmup_steps min_replay_size
    num_steps_sampled_before_learning_starts
algorithm.samples_per_insert (batch size x updates / environment steps): train_freq train_frequency gradient_steps
    training_intensity update_per_step updates_per_step utd utd_ratio replay_ratio
algorithm.target_tau (of dqn with algorithm.target_update=soft): tau polyak polyak_tau
algorithm.initial_alpha (algorithm.learn_alpha=false keeps it): alpha init_alpha temperature init_temperature ent_coef
algorithm.learn_alpha: autotune auto_alpha automatic_entropy_tuning
algorithm.actor_learning_rate (algorithm.learning_rate is the critics'): actor_lr policy_lr pi_lr
algorithm.learning_rate (of the critics; algorithm.actor_learning_rate is the actor's): critic_lr q_lr
algorithm.policy_delay: policy_frequency policy_freq update_actor_freq actor_delay
algorithm.exploration_noise (a deviation, of actions from -1 to 1): action_noise expl_noise act_noise
algorithm.target_noise: target_policy_noise policy_noise smooth_target_policy
algorithm.target_noise_clip: noise_clip
algorithm.target_every (in updates, not in steps): target_update_interval target_network_frequency
    target_network_update_freq target_update_freq target_update_period target_update_frequency
algorithm.epsilon_fraction: exploration_fraction
algorithm.epsilon_fraction (a share of the run): epsilon_timesteps epsilon_decay eps_decay exploration_steps
    epsilon_decay_steps
algorithm.epsilon_start: exploration_initial_eps start_e eps_start initial_epsilon epsilon_initial eps_train
algorithm.epsilon_end: exploration_final_eps end_e eps_end final_epsilon epsilon_final eps_train_final eps_min
    epsilon_min
algorithm.double: double_q double_dqn is_double use_double
algorithm.n_step: estimation_step nstep multi_step
algorithm.prioritized: prioritized_replay prioritized_replay_buffer use_per
algorithm.priority_alpha: prioritized_replay_alpha per_alpha priority_exponent
algorithm.priority_beta: prioritized_replay_beta prioritized_replay_beta0 per_beta importance_sampling_exponent
algorithm.buffer_size (and algorithm.prioritized; each is a setting of its own): replay_buffer_config
    replay_buffer_kwargs
network.hidden (a list of widths, such as [64, 64]): net_arch hidden_sizes hidden_layers hidden_dims hidden_units
    fcnet_hiddens layer_sizes mlp_layers encoder_mlp_layers hidden_size hidden_dim
network.hidden (with network.activation, network.conv and network.factory; images get convolutions): policy
    policy_kwargs model model_config
network.memory (lstm or gru): use_lstm use_rnn use_recurrent rnn_type lstm gru
network.memory_size: lstm_cell_size rnn_size lstm_hidden_size rnn_hidden_size recurrent_hidden_size
algorithm.sequence: max_seq_len recurrence seq_len sequence_length bptt_length chunk_length
algorithm.burn_in: replay_buffer_burn_in burnin burn_in_length
network.activation: activation_fn fcnet_activation nonlinearity
network.conv (as [[channels, kernel, stride], ...]): conv_filters cnn_layers
network.factory (your own torch module as module:factory): features_extractor features_extractor_class custom_model
    encoder
network.normalize_obs (true or false): norm_obs normalize_observation normalize_observations normalize_input obs_norm
    observation_filter
learner.scale_rewards (true divides by the running deviation of returns): norm_reward normalize_reward normalize_rewards
    normalize_returns rew_norm reward_normalization reward_scale
learner.device (auto, cpu, cuda or cuda:N): cuda use_cuda gpu use_gpu
learner.threads: num_threads n_threads torch_threads
ray.learner_gpus (for Ray; learner.device is what it uses): num_gpus num_gpus_per_learner gpus
ray.sampler_cpus: num_cpus_per_env_runner num_cpus_per_worker cpus_per_worker
ray.learner_cpus: num_cpus_per_learner
faults.restarts: restart_failed_env_runners recreate_failed_workers max_num_env_runner_restarts
""")

NONE: Mapping[str, str] = {
    # What there is nothing for, and what comes nearest, if anything does.
    "use_attention": "there is no attention; network.memory=lstm or gru is what remembers",
    "frame_stack n_stack num_stack": "stack frames by env_args.wrappers=[{FrameStack: {frames: 4}}]",
    "optimizer optimizer_class use_rms_prop rms_prop_eps weight_decay": "the optimiser is Adam, without weight decay",
    "num_learners num_learner_workers": "there is one learner",
    "num_policies policy_mapping_fn policies_to_train": "policies says by agent who plays by which, and which learn",
    "use_gae use_critic": "advantages always come from a critic; algorithm.gae_lambda=1 sums up rewards as they are",
    "with_vtrace use_vtrace": "V-trace is used wherever data is older than the policy",
    "dual_clip recompute_adv recompute_advantage": "PPO is the plain one, without this extension",
    "clip_rewards reward_clipping clip_reward": "clip rewards in the environment: gymnasium.wrappers.TransformReward",
    "noisy noisy_nets num_atoms v_min v_max num_quantiles": "dqn has no noisy networks and no distributions of values",
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

_CONTINUOUS = "for continuous actions there are sac, td3 and ppo"
_AGENTS = "several agents go with ppo: one policy for all, one for each (policies), algorithm.central_critic for MAPPO"
_MODEL = "nothing here learns a model of the environment"
_RECORDED = "bc learns from recorded episodes: --data PATH"
_EVOLUTION = "nothing here is an evolution strategy"
_MEMORY = "dqn with network.memory=lstm comes nearest, with stored states and algorithm.burn_in"
_MEAN = "dqn learns the mean of returns, not their distribution"

ALGORITHMS: Mapping[str, str] = {
    # What comes nearest in purpose, if anything does.
    "ddpg d4pg tqc redq droq crossq mpo vmpo naf": _CONTINUOUS,
    "discrete_sac": "sac, with algorithm.discrete=true",
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
    "r2d2 r2d3 ngu agent57 drqn": _MEMORY,
    "recurrent_ppo ppo_lstm ppo_recurrent": "ppo, with network.memory=lstm",
    "qmix vdn mappo ippo maddpg coma qplex": _AGENTS,
    "dreamer dreamer_v2 dreamer_v3 planet muzero efficientzero alphazero mbpo pets tdmpc tdmpc2 mbmpo": _MODEL,
    "marwil cql iql bcq crr awr awac td3_bc gail airl dqfd dt decision_transformer dagger sqil": _RECORDED,
    "es ars cem cma_es openai_es": _EVOLUTION,
    "her": "there is no hindsight replay; dqn replays what happened",
    "icm": "there is no bonus for curiosity but RND's: algorithm.rnd_coef of ppo",
    "maskable_ppo": "ppo: every algorithm for discrete actions knows action masks",
    "grpo dpo rlhf": "nothing here is made for language models",
}
