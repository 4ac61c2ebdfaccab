/** The resources of the REST API. Made from the server's structs, not by hand:
 * python -m tools.api_types
 */

export type Num = number | "-Infinity" | "Infinity" | "NaN";

/** Machine that offers slots. */
export interface Agent {
  /** Id, from 1. */
  id: number;
  /** Unique name. */
  name: string;
  /** Name of the machine. */
  host: string;
  /** Resource pool. */
  pool: string;
  /** Whether it is not lost. */
  alive: boolean;
  /** `ready`: accepts runs. `draining`: disabled, but runs still hold slots. `silent`: has not requested work for a while; its runs continue if it returns in time. `gone`: lost. */
  state: "disabled" | "draining" | "gone" | "leaving" | "ready" | "silent";
  /** Whether users allow new runs on it. */
  enabled: boolean;
  /** Seconds since its last request. */
  silent_s: number;
  /** Its devices: `id`, `device`, `enabled`, `down`, and the run that holds it: `run_id`, `trial_id`, `experiment_id`, `experiment`, `owner`, `load`. */
  slots: Array<Slot>;
  /** Time of its last registration. */
  registered_at: string;
  /** Newest load of the machine; null if the agent did not report any within a minute. */
  load: MachineLoad | null;
}

/** Response with one agent. */
export interface AgentAnswer {
  agent: Agent;
}

/** Response with all agents. */
export interface AgentPage {
  agents: Array<Agent>;
  next_after: null;
}

/** Token of a user, without its secret. */
export interface ApiToken {
  /** Id, from 1. */
  id: number;
  /** Purpose of the token. */
  name: string;
  /** Time of creation. */
  created_at: string;
  /** End of its validity; null: it has none. */
  expires_at: string | null;
  /** Time of its last use; null: it was never used. */
  last_used_at: string | null;
}

/** Tokens of a user, oldest first. */
export interface ApiTokenPage {
  tokens: Array<ApiToken>;
  next_after: null;
}

/** Change that a user made. */
export interface AuditEntry {
  /** Id, from 1. */
  id: number;
  /** Time of the change. */
  time: string;
  /** Name of the user. */
  user: string;
  /** API token of the request, or of the link of the browser; 0 for the token of the installation and for a sign-in with a password. */
  token_id: number;
  /** Method and path of the request, such as `POST /experiments/3/kill`. */
  action: string;
}

/** Page of changes, newest first. */
export interface AuditPage {
  changes: Array<AuditEntry>;
  next_after: string | null;
}

/** Checkpoint with the best validation at its step. */
export interface BestCheckpoint {
  /** The checkpoint; null if none has a validation at its step. */
  checkpoint: Checkpoint | null;
  /** The searcher's metric at its step. */
  validation: Num | null;
  /** Hint on how to save one, if the trial has ended and its best validation has no checkpoint. */
  note: string | null;
}

/** Response with the best checkpoint of an experiment or trial. */
export interface BestCheckpointAnswer {
  best_checkpoint: BestCheckpoint;
}

/** Best experiment of a group among those with the same metric. */
export interface BestOfGroup {
  /** Name of the metric. */
  metric: string;
  /** Its best value. */
  value: number;
  /** Experiment with this value. */
  experiment_id: number;
}

/** Rungs with separate lists of trials. */
export interface Bracket {
  /** Maximum number of trials, without replacements. */
  trials: number;
  /** Rungs, lowest first. */
  rungs: Array<Rung>;
}

/** Notification channel; its URL is never returned. */
export interface Channel {
  /** Name of the channel. */
  name: string;
  /** `webhook` or `apprise`. */
  kind: string;
  /** Events of which it gets messages. */
  events: Array<string>;
  /** Whether it gets messages about all experiments, not only those that name it. */
  all_experiments: boolean;
  /** User about whose experiments it gets messages, too; with `project`, only those in it. */
  user: string | null;
  /** Project about whose experiments it gets messages, too. */
  project: string | null;
  /** Number of messages that are still to be sent. */
  pending: number;
  /** Number of messages that were given up in the last 30 days. */
  failed: number;
  /** Time of the last delivered message. */
  last_sent_at: string | null;
  /** Why the newest message that has an error was not delivered; null after a delivery. */
  error: string | null;
  /** Time of creation. */
  created_at: string | null;
}

/** Response with one channel. */
export interface ChannelAnswer {
  channel: Channel;
  /** Secret that signs the messages of a webhook; only in the response to its creation. */
  secret: string | null;
}

/** Response with all channels, sorted by name. */
export interface ChannelPage {
  channels: Array<Channel>;
  next_after: null;
}

/** Saved state of a trial. */
export interface Checkpoint {
  /** Unique name. */
  uuid: string;
  /** Trial that saved it. */
  trial_id: number;
  /** Experiment of the trial. */
  experiment_id: number;
  /** Run that saved it. */
  run_id: number | null;
  /** Number of batches that the trial had trained. */
  steps_completed: number;
  /** Whether its files exist; `PARTIAL`: some of them were removed. */
  state: "COMPLETED" | "DELETED" | "ERROR" | "PARTIAL";
  /** Size of all its files. */
  size_bytes: number;
  /** Size of each file in bytes. */
  resources: Record<string, number>;
  /** Metadata saved with it. */
  metadata: Record<string, unknown>;
  /** Validation metrics at its step. */
  metrics: Record<string, Num> | null;
  /** Time of its completion. */
  created_at: string | null;
  /** Directory, or URL in an object store. */
  path: string;
}

/** Response with one checkpoint. */
export interface CheckpointAnswer {
  checkpoint: Checkpoint;
}

/** Page of checkpoints. */
export interface CheckpointPage {
  checkpoints: Array<Checkpoint>;
  next_after: string | null;
  /** Number of checkpoints on all pages, without deleted ones. */
  count: number;
  /** Size of all these checkpoints. */
  size_bytes: number;
}

/** Size of the cluster. */
export interface Cluster {
  agents: number;
  slots: number;
  free_slots: number;
}

/** Comment on an experiment. */
export interface Comment {
  /** Id, from 1. */
  id: number;
  /** Its experiment. */
  experiment_id: number;
  /** User who wrote it. */
  author: string;
  /** Plain text. */
  text: string;
  /** Time of creation. */
  created_at: string;
  /** Time of the last change by its author. */
  edited_at: string | null;
}

/** Response with one comment. */
export interface CommentAnswer {
  comment: Comment;
}

/** Page of comments, oldest first. */
export interface CommentPage {
  comments: Array<Comment>;
  next_after: string | null;
}

/** Metric over the steps. */
export interface Curve {
  /** `training`, `validation` or `system`. */
  group: string;
  /** Name of the metric. */
  name: string;
  /** Step and value; the value is a mean if points were merged. */
  points: Array<[number, Num]>;
  /** Step, minimum, maximum and mean of merged points; null if none were merged. */
  band: Array<[number, Num, Num, Num]> | null;
  /** Time of each point in seconds since 1970; null unless requested by `times`. */
  time_s: Array<number> | null;
  /** Whether most of its values were removed some days after the end of the experiment (`retention_policy.metric_retention_days`); points then represent up to 1,024 steps each. */
  values_removed: boolean;
}

/** Defaults and limits of the experiments of a project or of the installation. */
export interface Defaults {
  /** Name of the project; null for the installation. */
  project: string | null;
  /** Keys of the experiment file with their defaults; secrets are masked. */
  config: Record<string, unknown>;
  /** `slots_per_trial`, `max_slots`, `priority` and `storage_gb`; null where there is no limit. */
  limits: Limits;
  /** Time of the last change; null if none are set. */
  updated_at: string | null;
}

/** Response with defaults. */
export interface DefaultsAnswer {
  defaults: Defaults;
}

/** Engine configuration of a trial. */
export interface EngineAnswer {
  /** Engine file in the model directory; null if the experiment contains the configuration. */
  file: string | null;
  /** All keys that have an effect. */
  entries: Array<EngineEntry>;
  /** Replacements of deprecated or unsupported keys while the file was read. */
  changes: Array<string>;
  /** Reasons for missing entries. */
  problems: Array<string>;
}

/** Value of the engine's configuration. */
export interface EngineEntry {
  /** Dotted key. */
  key: string;
  /** Value that the engine uses. */
  value: unknown;
  /** `file`, `override`, `auto`, `default`, `derived` or `hint`, with an optional remark after a colon. */
  origin: string;
}

/** State of a trial at a rung. */
export type EntryState = "completed" | "failed" | "paused" | "promoted" | "stopped";

/** Body of every response with a status of 400 or above. */
export interface ErrorAnswer {
  error: ErrorBody;
}

/** Error with its type and message. */
export interface ErrorBody {
  type: string;
  message: string;
  problems: Array<string>;
}

/** Searcher and trials of one experiment file. */
export interface Experiment {
  /** Id, from 1. */
  id: number;
  /** Can be changed. */
  name: string;
  /** Can be changed. */
  description: string;
  /** Can be changed. */
  labels: Array<string>;
  /** Can be changed. */
  notes: string;
  /** User to whom it belongs; null while the installation has a single user. */
  owner: string | null;
  /** Its project; null if the installation has only one project. */
  project: string | null;
  /** State; `COMPLETED`, `CANCELED` and `ERROR` are final. */
  state: ExperimentState;
  /** Complete configuration with defaults and the chosen seed. */
  config: Record<string, unknown>;
  /** 0 to 1. */
  progress: number;
  /** Time of submission. */
  created_at: string;
  /** Start time of its first run. */
  started_at: string | null;
  /** End time. */
  ended_at: string | null;
  /** Whether it is archived. */
  archived: boolean;
  /** Whether it was submitted with `test`. */
  test_mode: boolean;
  /** Id of the original experiment of a fork. */
  forked_from: number | null;
  /** Uuid of the checkpoint from which its trials start. */
  source_checkpoint: string | null;
  /** Name of the searcher. */
  searcher_name: string;
  /** Validation metric that compares trials; null for a single trial without one. */
  metric: string | null;
  /** Whether smaller values of the metric are better. */
  smaller_is_better: boolean;
  /** Number of trials created so far. */
  num_trials: number;
  /** Number of trials that ended with an error. */
  failed_trials: number;
  /** Number of canceled trials. */
  canceled_trials: number;
  /** Best trial so far. */
  best_trial_id: number | null;
  /** Metric of the best trial. */
  best_validation: Num | null;
  /** Why none of its trials runs while it is `ACTIVE`; else null. */
  waiting_reason: string | null;
  /** One-line error if it failed or no trial has a result; the logs have the traceback. */
  error: string | null;
  /** Why it ended without a result, even if `COMPLETED`: all trials failed, or none reported a number for the metric; else null. */
  result_problem: string | null;
  /** Time at which most values of its training and system metrics were removed (`retention_policy.metric_retention_days`); null if all are stored. */
  metrics_expired_at: string | null;
  /** Searched hyperparameters that no trial has read; empty while unknown. */
  unread_hparams: Array<string>;
}

/** Response with one experiment. */
export interface ExperimentAnswer {
  experiment: Experiment;
  /** Warnings of a submission, one line each. */
  warnings: Array<string>;
}

/** Metrics of every experiment's best trial, oldest experiment first. */
export interface ExperimentColumns {
  /** All metrics that were ever reported. */
  names: Array<MetricName>;
  /** `id` of the experiment and the requested metrics of its best trial, or of its first trial if none is best. Missing values are null. */
  columns: Record<string, Array<Num | null>>;
}

/** Experiments with the same value. */
export interface ExperimentGroup {
  /** The value; null: not set, no single value, or no label. */
  value: string | number | boolean | null;
  /** Number of experiments. */
  experiments: number;
  /** Number of experiments that have not ended. */
  unfinished: number;
  /** Number of experiments in the state `ERROR`. */
  failed: number;
  /** Best results, one for each metric; the most frequent metric first. */
  best: Array<BestOfGroup>;
}

/** Groups of experiments, the largest first. */
export interface ExperimentGroups {
  groups: Array<ExperimentGroup>;
  /** Number of smaller groups that are not listed. */
  omitted: number;
  next_after: null;
}

/** Page of experiments. */
export interface ExperimentPage {
  experiments: Array<Experiment>;
  next_after: string | null;
}

/** State of an experiment. */
export type ExperimentState = "ACTIVE" | "CANCELED" | "COMPLETED" | "ERROR" | "PAUSED" | "STOPPING_CANCELED" | "STOPPING_COMPLETED" | "STOPPING_ERROR" | "STOPPING_KILLED";

/** Run that accepts reports. */
export interface ExternalRun {
  experiment_id: number;
  trial_id: number;
  run_id: number;
  /** Last step of the trial; 0 for a new one. */
  steps_completed: number;
  /** Token for the routes of this run, valid until it ends. */
  token: string;
}

/** Response of a healthy server with a working database. */
export interface Health {
  status: "ok";
}

/** Importance of one hyperparameter. */
export interface HparamShare {
  /** Dotted name. */
  name: string;
  /** Its share of the variance between trials, alone and together with others: 0 if it has no effect, 1 if it determines the result. */
  importance: number;
  /** Standard error of the importance, over the trees. */
  spread: number;
}

/** Time since the last use of a task. */
export interface IdleTime {
  /** Seconds. */
  idle_s: number;
}

/** Importance of the hyperparameters for the searcher's metric. */
export interface Importance {
  /** Description of the method and its limits. */
  method: string;
  /** Number of trials with a result. */
  trials: number;
  /** Out-of-bag R2: share of the variance that the hyperparameters predict for unseen trials. Below 0.2 the shares mean little. */
  explained: number | null;
  /** Importance of the hyperparameters, largest first. */
  shares: Array<HparamShare>;
  /** Why there is no result; else null. */
  problem: string | null;
}

/** Validation that is better than all previous ones. */
export interface Improvement {
  /** Time when the searcher received it. */
  time: string;
  /** Trial of the validation. */
  trial_id: number;
  /** Length of the trial at that time, in the searcher's unit. */
  length: number | null;
  /** The searcher's metric. */
  value: Num;
}

/** Version, database and cluster of the server. */
export interface Info {
  version: string;
  home: string;
  database: "postgresql" | "sqlite";
  started_at: string;
  cluster: Cluster;
  /** Number of projects that the caller sees. */
  projects: number;
}

/** Running task whose port can be used. */
export interface InteractiveTask {
  experiment_id: number;
  kind: "notebook" | "port" | "shell" | "tensorboard";
  /** Path of its page on this server. */
  path: string;
  /** Whether it accepts connections now. */
  ready: boolean;
  /** Seconds since its last use. */
  idle_s: number;
  /** Idle time in seconds after which it ends; null for no limit. */
  idle_timeout_s: number | null;
  /** User name on the machine, for ssh. */
  user: string;
  /** Public key of its sshd; empty for other kinds. */
  host_key: string;
}

/** Running tasks with a port. */
export interface InteractiveTasks {
  tasks: Array<InteractiveTask>;
}

/** Experiment in the queue. */
export interface Job {
  /** Id of the experiment. */
  experiment_id: number;
  /** Name of the experiment. */
  name: string;
  /** Its owner; null if the installation has only one user. */
  owner: string | null;
  /** Its project; null if the installation has only one project. */
  project: string | null;
  /** State of the experiment. */
  state: ExperimentState;
  /** Resource pool. */
  pool: string;
  /** Position in the order in which the waiting experiments of its pool start, from 1; null if no trial waits, or the experiment is paused. */
  place: number | null;
  /** Why it starts later than by priority and position: the shares; null if it does not. */
  order_reason: string | null;
  /** 1 to 99; smaller values run first, unless the pool's policy is `fifo`. */
  priority: number;
  /** Weight of its share of the slots in a pool with the policy `fair_share`. */
  weight: number;
  /** Maximum number of slots that its trials may hold together. */
  max_slots: number | null;
  /** Seconds after which it fails if none of its trials got slots. */
  queue_time: number | null;
  /** Labels; quotas may refer to them. */
  labels: Array<string>;
  /** Number of slots of each trial in the pool. */
  slots_per_trial: number;
  /** Number of slots of each trial on the machines of a hostfile; 0 without a hostfile. */
  host_slots: number;
  /** Number of trials that hold slots. */
  running_trials: number;
  /** Number of trials that wait for slots. */
  queued_trials: number;
  /** Number of slots of the pool that its runs hold. */
  held_slots: number;
  /** Why its next trial waits, even if others run; null if none waits. */
  waiting_reason: string | null;
  /** Message about its first trial that runs on fewer slots than requested; null if none does. */
  fewer_reason: string | null;
  /** Time of submission. */
  created_at: string;
}

/** Response with one job. */
export interface JobAnswer {
  job: Job;
}

/** Queue by pool: running, waiting in the order in which they start, and paused experiments. */
export interface JobPage {
  jobs: Array<Job>;
  next_after: null;
}

/** Limits of experiments at their submission, and of changes of jobs by members. */
export interface Limits {
  slots_per_trial: number | null;
  max_slots: number | null;
  priority: number | null;
  storage_gb: number | null;
}

/** Load of the slots in the last hour, as far as the server has run. */
export interface LoadHistoryAnswer {
  history: Array<SlotHistory>;
}

/** Line of a log. */
export interface Log {
  /** Id; increases in the order of arrival. */
  id: number;
  /** Trial of the line. */
  trial_id: number | null;
  /** Run of the line. */
  run_id: number | null;
  /** Rank that wrote it; null for the agent and the server. */
  rank: number | null;
  /** Stream or process that wrote it. */
  stream: "agent" | "server" | "stderr" | "stdout";
  /** `DEBUG`, `INFO`, `WARNING`, `ERROR` or `CRITICAL`, if known. */
  level: string | null;
  /** Text of the line. */
  text: string;
  /** Time of writing. */
  time: string | null;
  /** Host of the agent that sent it; null for the server. */
  host: string | null;
}

/** Page of log lines. */
export interface LogPage {
  logs: Array<Log>;
  next_after: number | null;
}

/** Link that opens the page once. */
export interface LoginLink {
  url: string;
}

/** Load of an agent's machine. */
export interface MachineLoad {
  /** CPU time of all programs, of all cores together: at most 100. */
  cpu_percent: number;
  /** Number of CPU cores. */
  cores: number;
  /** Memory in use. */
  memory_bytes: number;
  /** Memory of the machine. */
  memory_total_bytes: number;
  /** Used bytes of the file system with the agent's data directory. */
  disk_bytes: number;
  /** Size of that file system. */
  disk_total_bytes: number;
}

/** Medium of a trial at a step. */
export interface Media {
  /** Name, the same at each step. */
  name: string;
  /** Number of batches that the trial had trained. */
  step: number;
  /** Index among the media of the same name and step. */
  position: number;
  /** Kind of the medium. */
  type: "audio" | "file" | "histogram" | "image" | "table" | "text";
  /** SHA-256 of the content, for the download; empty if `metadata` is the content. */
  digest: string;
  /** Size of the content in bytes. */
  size: number;
  /** Name of the downloaded file. */
  file_name: string;
  /** Caption, width and height, sample rate, or bins of a histogram. */
  metadata: Record<string, unknown>;
  /** Time of the report. */
  time: string | null;
}

/** Name of media of a trial, with its totals. */
export interface MediaName {
  /** Name of the media. */
  name: string;
  /** Kind of the media. */
  type: "audio" | "file" | "histogram" | "image" | "table" | "text";
  /** Number of media. */
  count: number;
  /** First step. */
  first_step: number;
  /** Last step. */
  last_step: number;
  /** Size of all of them in bytes. */
  size: number;
}

/** Response with the names of a trial's media, sorted. */
export interface MediaNamePage {
  names: Array<MediaName>;
  next_after: null;
}

/** Response with a page of media, sorted by name, step and position. */
export interface MediaPage {
  media: Array<Media>;
  next_after: string | null;
}

/** Metric that a trial has reported. */
export interface MetricName {
  group: string;
  name: string;
}

/** Response of ``metric-names``. */
export interface MetricNames {
  names: Array<MetricName>;
}

/** Response of ``metrics``. */
export interface Metrics {
  metrics: Array<Curve>;
}

/** Model of the registry. */
export interface Model {
  /** Name of the model. */
  name: string;
  /** Description. */
  description: string;
  /** User who created it; null while the installation has a single user. */
  owner: string | null;
  /** Its project; null if the installation has only one project. */
  project: string | null;
  /** Time of creation. */
  created_at: string | null;
  /** Versions, oldest first; their checkpoints are kept until removed from the registry. */
  versions: Array<ModelVersion>;
}

/** Response with one model. */
export interface ModelAnswer {
  model: Model;
}

/** File of a model directory. */
export interface ModelFile {
  /** Path inside the directory. */
  path: string;
  /** Size of the file. */
  size_bytes: number;
}

/** All files of a model directory, sorted by path. */
export interface ModelFilePage {
  files: Array<ModelFile>;
  next_after: null;
}

/** Response with all models, sorted by name. */
export interface ModelPage {
  models: Array<Model>;
  next_after: null;
}

/** Registered checkpoint. */
export interface ModelVersion {
  /** Number, from 1; never reused. */
  version: number;
  /** Uuid of the checkpoint. */
  checkpoint: string;
  /** Experiment of the checkpoint. */
  experiment_id: number;
  /** Trial of the checkpoint. */
  trial_id: number;
  /** Number of batches that the trial had trained. */
  steps_completed: number;
  /** Size of all its files. */
  size_bytes: number;
  /** Validation metrics at its step. */
  metrics: Record<string, Num> | null;
  /** Notes from its registration. */
  notes: string;
  /** Aliases of this version, sorted. */
  aliases: Array<string>;
  /** Time of registration. */
  created_at: string | null;
}

/** Response with a new token. */
export interface NewApiToken {
  /** The token itself; no other response shows it. */
  secret: string;
  token: ApiToken;
}

/** Response to the creation of a share link. */
export interface NewShareAnswer {
  /** Path of the link, with its token; shown only once. */
  url: string;
  share: Share;
}

/** Message to a channel. */
export interface Notification {
  /** Number of the message. */
  id: number;
  /** Name of its channel. */
  channel: string;
  /** Name of the event. */
  event: string;
  /** Experiment of the event. */
  experiment_id: number;
  /** Title of the message. */
  title: string;
  /** PENDING, SENT or FAILED. */
  state: string;
  /** Number of attempts to send it. */
  attempts: number;
  /** Error of the last attempt. */
  error: string | null;
  /** Time of the event. */
  created_at: string | null;
  /** Time at which it was delivered or given up. */
  ended_at: string | null;
}

/** Response with the newest messages, newest first. */
export interface NotificationPage {
  notifications: Array<Notification>;
  next_after: null;
}

/** Response to the opening of a share link. */
export interface OpenedShare {
  /** Page that it opens, as `path` of the link. */
  path: string;
}

/** Agents that are scheduled together. */
export interface Pool {
  /** Name, as in `zerolab agent start --pool` and `resources.resource_pool`. */
  name: string;
  /** Order in which its jobs start. */
  policy: "fair_share" | "fifo" | "priority";
  /** Number of its live agents. */
  agents: number;
  /** Number of their slots. */
  slots: number;
  /** Number of slots on which a run could start now. */
  free_slots: number;
  /** Number of its experiments that have not ended. */
  jobs: number;
  /** Quota: maximum number of slots that its jobs may hold together. */
  max_slots: number | null;
}

/** Response with one pool. */
export interface PoolAnswer {
  pool: Pool;
}

/** Response with all pools. */
export interface PoolPage {
  pools: Array<Pool>;
  next_after: null;
}

/** Estimate of a search's trials and cost. */
export interface PreviewAnswer {
  preview: SearchPreview;
}

/** Trials that end at one length. */
export interface PreviewLength {
  /** Length in the unit of the search. */
  length: number;
  /** Number of trials that end there. */
  trials: number;
}

/** Project, to which experiments and models belong. */
export interface Project {
  /** Name; it cannot be changed. */
  name: string;
  /** Description in one line. */
  description: string;
  /** Notes. */
  notes: string;
  /** User who created it; null while the installation has a single user. */
  owner: string | null;
  /** Whether it accepts no new experiments and models. */
  archived: boolean;
  /** Whether only its owner, its members and administrators see it and what belongs to it. */
  restricted: boolean;
  /** Number of its experiments. */
  experiments: number;
  /** Number of its experiments that have not ended. */
  unfinished: number;
  /** Number of its models. */
  models: number;
  /** Time of its last submission. */
  last_experiment_at: string | null;
  /** Time of creation. */
  created_at: string;
}

/** Response with one project. */
export interface ProjectAnswer {
  project: Project;
}

/** User who sees a restricted project. */
export interface ProjectMember {
  /** Name of the user. */
  user: string;
  /** Whether the project belongs to this user, who is always a member. */
  owner: boolean;
}

/** Members of a project, sorted by name. */
export interface ProjectMembers {
  members: Array<ProjectMember>;
  next_after: null;
}

/** All projects, sorted by name. */
export interface ProjectPage {
  projects: Array<Project>;
  next_after: null;
}

/** Maximum number of slots that some jobs may hold together. */
export interface Quota {
  /** `pool:NAME`, `label:NAME`, `user:NAME` or `project:NAME`; `user:*` is the default for each user without a quota. */
  group: string;
  /** Maximum number of slots. */
  max_slots: number;
  /** Number of slots that these jobs hold now. */
  held_slots: number;
  /** Whether it is the default of `user:*` for a user without a quota. */
  is_default: boolean;
  /** Of `user:*`: maximum number of slots that a user may request; null without a limit. */
  request_limit: number | null;
}

/** Response with one quota. */
export interface QuotaAnswer {
  quota: Quota;
}

/** Response with all quotas. */
export interface QuotaPage {
  quotas: Array<Quota>;
  next_after: null;
}

/** Request of a user for a larger quota. */
export interface QuotaRequest {
  /** Id, from 1. */
  id: number;
  /** User who requests it. */
  user: string;
  /** Requested quota. */
  max_slots: number;
  /** Reason that the user gives. */
  reason: string;
  /** `OPEN` until an administrator decides. */
  state: "APPROVED" | "DECLINED" | "OPEN";
  /** Time of the request. */
  created_at: string;
  /** Time of the decision. */
  decided_at: string | null;
  /** Administrator who decided. */
  decided_by: string | null;
  /** Reason that the administrator gives. */
  answer: string;
}

/** Response with one request. */
export interface QuotaRequestAnswer {
  request: QuotaRequest;
}

/** Requests, newest first. */
export interface QuotaRequestPage {
  requests: Array<QuotaRequest>;
  next_after: null;
}

/** Removed checkpoints, or those that a dry run would remove. */
export interface Removal {
  /** Whether nothing was removed. */
  dry_run: boolean;
  /** Removed checkpoints or files. */
  checkpoints: Array<RemovedCheckpoint>;
  /** Size of all removed files. */
  size_bytes: number;
}

/** Removed checkpoint, or removed files of one. */
export interface RemovedCheckpoint {
  /** Unique name. */
  uuid: string;
  /** Trial that saved it. */
  trial_id: number;
  /** Number of batches that the trial had trained. */
  steps_completed: number;
  /** Whether all its files are removed. */
  whole: boolean;
  /** Removed files. */
  files: Array<string>;
  /** Size of the removed files. */
  size_bytes: number;
}

/** Response to a deletion of media. */
export interface RemovedMedia {
  /** Number of deleted media. */
  count: number;
  /** Size of their content in bytes. */
  size: number;
}

/** One continuous execution of a trial. */
export interface Run {
  /** Id, from 1, unique over all trials. */
  id: number;
  /** Its trial. */
  trial_id: number;
  /** State. */
  state: RunState;
  /** Names of the agents whose slots it holds or held, chief first, without deleted agents. */
  agents: Array<string>;
  /** Time when it got its slots. */
  created_at: string;
  /** Time when its ranks started. */
  started_at: string | null;
  /** Time when it released its slots. */
  ended_at: string | null;
  /** Exit code of its launcher; null while it runs or if unknown. */
  exit_code: number | null;
  /** Why it ended, if it did not complete. */
  reason: string | null;
  /** Whether it ended with an error; false while it runs or if it was preempted. */
  failed: boolean;
}

/** All runs of a trial, oldest first. */
export interface RunPage {
  runs: Array<Run>;
  next_after: null;
}

/** State of a run, which holds its slots until it has exited. */
export type RunState = "ASSIGNED" | "EXITED" | "RUNNING";

/** Length at which trials are compared. */
export interface Rung {
  /** Length in the unit of the search. */
  length: number;
  /** Trials that train towards it. */
  training: Array<number>;
  /** Results at this rung, best first. */
  entries: Array<RungEntry>;
}

/** Result of a trial at a rung. */
export interface RungEntry {
  /** The trial. */
  trial_id: number;
  /** Reported metric; null if it was NaN or missing. */
  metric: Num | null;
  /** `promoted`: continued to the next rung. `paused`: may still be promoted. `stopped`: ended at this rung. `completed`: reached the highest rung. `failed`: ended early, ranks last. */
  state: EntryState;
}

/** Event for a searcher. */
export interface SearchEvent {
  /** Id, increasing with gaps. */
  id: number;
  /** Kind of the event. */
  kind: "created" | "exited" | "exited_early" | "validated";
  /** The searcher's number of the trial, from its creation. */
  trial_id: number;
  /** Metric of `validated`; `NaN` ranks last. */
  metric: Num | null;
  /** Length of the trial at `validated`, in the unit of the search. */
  length: number | null;
  /** Reason of `exited_early`: `errored`, `invalid_hp` or `user_canceled`. */
  reason: string | null;
}

/** Events of a search, oldest first. */
export interface SearchEvents {
  /** Events, at most 1,000. */
  events: Array<SearchEvent>;
  /** Last event that operations have handled; -1 before the first operations, 0 after them. */
  handled: number;
  /** Whether the experiment accepts no more operations. */
  over: boolean;
}

/** Response to operations. */
export interface SearchHandled {
  /** Last event that operations have handled. */
  handled: number;
}

/** Estimate of a search's trials and cost. */
export interface SearchPreview {
  /** Short summary. */
  outline: string;
  /** Number of trials; null if the searcher does not know it. */
  trials: number | null;
  /** Unit of all lengths; null if trials decide their lengths. */
  unit: "batches" | "epochs" | null;
  /** Expected numbers of trials by final length. */
  lengths: Array<PreviewLength>;
  /** Expected sum over all trials; null if unknown. */
  total_length: number | null;
  /** Maximum sum over all trials; null if unknown. */
  most_length: number | null;
  /** Slots that each trial holds while it trains. */
  slots_per_trial: number;
  /** Time of one batch or one epoch; null if unknown. */
  seconds_per_unit: number | null;
  /** Experiment from which this time was taken; null if it was given. */
  like: number | null;
  /** Slot hours of all trials for `total_length`; null if a time or length is unknown. */
  slot_hours: number | null;
  /** Slot hours of all trials for `most_length`; null if unknown. */
  most_slot_hours: number | null;
  /** Assumption of the estimate; null if it is exact or unknown. */
  premise: string | null;
  /** Probable mistakes of the search, one line each. */
  warnings: Array<string>;
}

/** Best value so far over time. */
export interface SearchProgress {
  improvements: Array<Improvement>;
  /** Number of all validations. */
  validations: number;
}

/** Response with the state of a search. */
export interface SearcherAnswer {
  searcher: SearcherState;
}

/** Rungs and trials of a search. */
export interface SearcherState {
  /** Name of the searcher. */
  name: string;
  /** Unit of all lengths; null if trials decide their lengths. */
  unit: "batches" | "epochs" | null;
  /** Metric that compares trials; null for a single trial without one. */
  metric: string | null;
  /** Whether smaller values of the metric are better. */
  smaller_is_better: boolean;
  /** Whether it creates no more trials. */
  done: boolean;
  /** 0 to 1. */
  progress: number;
  /** Brackets; empty if the searcher does not compare trials during training. */
  brackets: Array<Bracket>;
  /** Why the state is unknown; null if it is known. */
  problem: string | null;
}

/** Share link, without its token. */
export interface Share {
  /** Id, from 1. */
  id: number;
  /** Purpose of the link. */
  name: string;
  /** User who created it. */
  owner: string;
  /** Experiments that it shows. */
  experiments: Array<number>;
  /** Page that it opens: the part of its address after `#`. */
  path: string;
  /** Time of creation. */
  created_at: string;
  /** End of its validity. */
  expires_at: string;
  /** Whether it has not expired and its owner is active. */
  valid: boolean;
}

/** Share links, newest first. */
export interface SharePage {
  shares: Array<Share>;
  next_after: null;
}

/** Content of a share link. */
export interface SharedExperiments {
  /** Purpose of the link. */
  name: string;
  /** Page that it opens, as `path` of the link. */
  path: string;
  /** End of its validity. */
  expires_at: string;
  /** Its experiments that were not deleted since, newest first. */
  experiments: Array<Experiment>;
}

/** Device of an agent. */
export interface Slot {
  /** Number on its agent, from 0. */
  id: number;
  /** `cpu`, or `cuda:0 NAME`. */
  device: string;
  /** Run that holds it. */
  run_id: number | null;
  /** Whether users allow new runs on it. */
  enabled: boolean;
  /** Whether the cluster of its agent has lost the node, so that nothing can start on it. */
  down: boolean;
  /** Experiment of the run; null if the caller may not see it. */
  experiment_id: number | null;
  /** Name of the experiment. */
  experiment: string | null;
  /** Trial of the run. */
  trial_id: number | null;
  /** Owner of the experiment; null if the installation has only one user. */
  owner: string | null;
  /** Newest load; null if the agent did not report any within a minute. */
  load: SlotUse | null;
}

/** Load of a slot in the last hour. */
export interface SlotHistory {
  /** Agent of the slot. */
  agent_id: number;
  /** Number of the slot on its agent. */
  slot: number;
  /** Whether the load is the utilization of the GPU; else CPU time of the slot's run (100 is one core). */
  gpu: boolean;
  /** Mean of each minute, oldest first; the last one is the current minute. Null for a minute without a measurement. */
  percent: Array<number | null>;
}

/** Load of a slot, as its agent measured it. */
export interface SlotUse {
  /** CPU time of the processes of its run; 100 is one core. Null if none runs. */
  cpu_percent: number | null;
  /** Resident memory of these processes; pages that they share count for each one. */
  memory_bytes: number | null;
  /** Utilization of the GPU by any program; null without a GPU, or if it does not report it. */
  gpu_percent: number | null;
  /** Used memory of the GPU. */
  gpu_memory_bytes: number | null;
  /** Memory of the GPU. */
  gpu_memory_total_bytes: number | null;
}

/** Configuration of an experiment as submitted. */
export interface SubmittedAnswer {
  config: Record<string, unknown>;
}

/** Link to a task. */
export interface TaskLink {
  /** One-time URL that opens the task without signing in; valid for one minute. */
  url: string;
}

/** Result of a test message. */
export interface TestAnswer {
  /** Whether the receiver has accepted it. */
  delivered: boolean;
  /** Why not. */
  error: string | null;
}

/** Token: the owner's, or the join token of agents. */
export interface Token {
  token: string;
}

/** Training with one choice of hyperparameters. */
export interface Trial {
  /** Id, from 1, unique over all experiments. */
  id: number;
  /** Its experiment. */
  experiment_id: number;
  /** State. `PAUSED`: it released its slots and waits. */
  state: TrialState;
  /** Hyperparameters chosen by the searcher. */
  hparams: Record<string, unknown>;
  /** Seed chosen by the searcher. */
  seed: number;
  /** Number of restarts after failures. */
  restarts: number;
  /** Number of trained batches. */
  steps_completed: number;
  /** 0 to 1. */
  progress: number;
  /** Activity of its run: `starting`, `training`, `validating`, `checkpointing`. */
  activity: string | null;
  /** Why it has no slots while it is `QUEUED`; an error of its script at a rung while it is `PAUSED`; else null. */
  waiting_reason: string | null;
  /** Names of log policies that matched its log. */
  labels: Array<string>;
  /** Whether it is archived; lists can exclude it. */
  archived: boolean;
  /** Best value of the searcher's metric. */
  best_validation: Num | null;
  /** Batch of the best validation. */
  best_steps: number | null;
  /** Latest value of the searcher's metric. */
  latest_validation: Num | null;
  /** Cost so far: slots times seconds for which its runs held them. */
  slot_seconds: number;
  /** Uuid of the latest checkpoint. */
  latest_checkpoint: string | null;
  /** Uuid of the best checkpoint. */
  best_checkpoint: string | null;
  /** Trial from whose weights it starts, if chosen by the searcher. */
  source_trial_id: number | null;
  /** Uuid of the checkpoint from which it starts; empty if its source trial has none. */
  source_checkpoint: string | null;
  /** Current run. */
  run_id: number | null;
  /** Time when the searcher created it. */
  created_at: string;
  /** Start time of its first run. */
  started_at: string | null;
  /** End time. */
  ended_at: string | null;
  /** One-line message for the user. */
  error: string | null;
  /** Why it ended without a result, even if `COMPLETED` (no validation, or only NaN); else null. */
  result_problem: string | null;
}

/** Response with one trial. */
export interface TrialAnswer {
  trial: Trial;
}

/** All trials of an experiment, oldest first: a list per column. */
export interface TrialColumns {
  /** Fields of a trial such as `id` and `state`, and hyperparameters as `hparams.NAME` with their dotted names. Missing values are null; infinities and NaN are text. */
  columns: Record<string, Array<number | string | boolean | null>>;
}

/** Page of trials. */
export interface TrialPage {
  trials: Array<Trial>;
  next_after: string | null;
  /** Number of trials on all pages. */
  total: number;
}

/** State of a trial; a paused one has released its slots. */
export type TrialState = "CANCELED" | "COMPLETED" | "ERROR" | "PAUSED" | "QUEUED" | "RUNNING" | "STOPPING";

/** Usage in a month, the largest first. */
export interface UsagePage {
  /** Month in UTC, `YYYY-MM`. */
  month: string;
  /** `user`, `project`, `label` or `pool`. */
  by: string;
  usage: Array<UsageRow>;
  next_after: null;
}

/** Usage of one user, project, label or pool. */
export interface UsageRow {
  /** Name of the user, project, label or pool; empty for experiments without labels. */
  name: string;
  /** Number of experiments that had slots in the month. */
  experiments: number;
  /** Slots x hours of their runs in the month. */
  slot_hours: number;
  /** Size of checkpoints and media of all experiments, now. */
  disk_bytes: number;
}

/** User of the installation. */
export interface User {
  /** Name; it cannot be changed. */
  name: string;
  /** `viewer` reads, `member` also submits and changes what they own, `admin` changes everything. */
  role: "admin" | "member" | "viewer";
  /** Whether tokens and browser sessions of the user are valid. */
  active: boolean;
  /** Share of the slots of a pool with the policy `fair_share`, relative to other users. */
  weight: number;
  /** Time of creation. */
  created_at: string;
}

/** Response with one user. */
export interface UserAnswer {
  user: User;
}

/** All users, sorted by name. */
export interface UserPage {
  users: Array<User>;
  next_after: null;
}

/** Saved view of the page. */
export interface View {
  /** Id, from 1. */
  id: number;
  /** Name, unique among the views of its owner. */
  name: string;
  /** User who saved it. */
  owner: string;
  /** Part of a page address after `#`: the list or comparison, with its filters, columns, order and chart settings. */
  path: string;
  /** Whether all users see it. */
  shared: boolean;
  /** Time of creation. */
  created_at: string;
  /** Time of the last change. */
  updated_at: string;
}

/** Response with one view. */
export interface ViewAnswer {
  view: View;
}

/** Views of the user and shared views of others, sorted by name. */
export interface ViewPage {
  views: Array<View>;
  next_after: null;
}

/** The caller. */
export interface Whoami {
  /** Name of the user; empty for a share link. */
  user: string;
  /** Role of the user. */
  role: "admin" | "member" | "viewer";
  /** Whether the request has a token, comes from a browser or has a share link. */
  kind: "browser" | "share" | "token";
  /** End of the validity of the API token or share link that is used; null: it has none. */
  expires_at: string | null;
  /** Whether the installation has several users. */
  shared: boolean;
}
