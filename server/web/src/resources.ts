/** The resources of the REST API. Made from the server's structs, not by hand:
 * python -m tools.api_types
 */

export type Num = number | "-Infinity" | "Infinity" | "NaN";

/** A machine that offers slots. */
export interface Agent {
  /** Number, from 1. */
  id: number;
  /** The same name is the same agent. */
  name: string;
  /** Name of the machine. */
  host: string;
  /** The resource pool that it has joined. */
  pool: string;
  /** Whether it asks for work, or may yet. */
  alive: boolean;
  /** `ready` takes runs. `draining`: disabled, and runs still hold slots. `silent`: it has not asked for work for a while; its runs go on if it comes back in time. `gone`: given up. */
  state: "disabled" | "draining" | "gone" | "leaving" | "ready" | "silent";
  /** Whether new runs may start there, as its owner says. */
  enabled: boolean;
  /** Seconds since it was heard of. */
  silent_s: number;
  /** Its devices: `id`, `device`, `run_id` of the run that holds it, whether it is `enabled`, or `down`. */
  slots: Array<Slot>;
  /** When it registered, the last time. */
  registered_at: string;
}

/** One agent. */
export interface AgentAnswer {
  agent: Agent;
}

/** All agents. */
export interface AgentPage {
  agents: Array<Agent>;
  next_after: null;
}

/** The checkpoint whose own validation is the best. */
export interface BestCheckpoint {
  /** Null when no checkpoint has a validation at its batch. */
  checkpoint: Checkpoint | null;
  /** The searcher's metric at that batch. */
  validation: Num | null;
  /** Set when the trial has ended and its best validation has no checkpoint: what saves one. */
  note: string | null;
}

/** The best checkpoint of an experiment or a trial. */
export interface BestCheckpointAnswer {
  best_checkpoint: BestCheckpoint;
}

/** Rungs with separate lists of trials. */
export interface Bracket {
  /** How many trials it has at most, if none has to be replaced. */
  trials: number;
  /** The lowest first. */
  rungs: Array<Rung>;
}

/** A saved state of a trial. */
export interface Checkpoint {
  /** Its name. */
  uuid: string;
  /** Whose state it is. */
  trial_id: number;
  /** Whose trial that is. */
  experiment_id: number;
  /** The run that saved it. */
  run_id: number | null;
  /** Batches that the trial had trained. */
  steps_completed: number;
  /** Whether its files are there; `PARTIAL`: some of them were removed. */
  state: "COMPLETED" | "DELETED" | "ERROR" | "PARTIAL";
  /** Of all its files. */
  size_bytes: number;
  /** File to bytes. */
  resources: Record<string, number>;
  /** What was saved with it. */
  metadata: Record<string, unknown>;
  /** Validation metrics at that step. */
  metrics: Record<string, Num> | null;
  /** When it was complete. */
  created_at: string | null;
  /** Its directory, or its URL in an object store. */
  path: string;
}

/** One checkpoint. */
export interface CheckpointAnswer {
  checkpoint: Checkpoint;
}

/** A page of checkpoints. */
export interface CheckpointPage {
  checkpoints: Array<Checkpoint>;
  next_after: string | null;
  /** How many are there, on all pages; deleted ones are not counted. */
  count: number;
  /** Of those. */
  size_bytes: number;
}

/** What there is to run on. */
export interface Cluster {
  agents: number;
  slots: number;
  free_slots: number;
}

/** A metric over the steps. */
export interface Curve {
  /** `training`, `validation` or `system`. */
  group: string;
  /** Of the metric. */
  name: string;
  /** Step and value; the mean of its neighbours where points were merged. */
  points: Array<[number, Num]>;
  /** Step, minimum, maximum and mean of the points that were merged; null when none were. */
  band: Array<[number, Num, Num, Num]> | null;
  /** When each point was reported, in seconds since 1970; null unless `times` asks for it. */
  time_s: Array<number> | null;
}

/** The engine's configuration of a trial. */
export interface EngineAnswer {
  /** The engine file in the model directory; null where the experiment holds its content. */
  file: string | null;
  /** Every key that has an effect. */
  entries: Array<EngineEntry>;
  /** What was written otherwise before the file was read. */
  changes: Array<string>;
  /** Why there are no entries. */
  problems: Array<string>;
}

/** A value of the engine's configuration. */
export interface EngineEntry {
  /** Dotted. */
  key: string;
  /** What the engine uses. */
  value: unknown;
  /** `file`, `override`, `auto`, `default`, `derived` or `hint`; after a colon a remark. */
  origin: string;
}

/** State of a trial at a rung. */
export type EntryState = "completed" | "failed" | "paused" | "promoted" | "stopped";

/** Body of every answer of 400 and above. */
export interface ErrorAnswer {
  error: ErrorBody;
}

/** What went wrong. */
export interface ErrorBody {
  type: string;
  message: string;
  problems: Array<string>;
}

/** One config file's run: a searcher and its trials. */
export interface Experiment {
  /** Number, from 1. */
  id: number;
  /** Can be changed. */
  name: string;
  /** Can be changed. */
  description: string;
  /** Can be changed. */
  labels: Array<string>;
  /** Can be changed. */
  notes: string;
  /** Where it stands; `COMPLETED`, `CANCELED` and `ERROR` are for good. */
  state: ExperimentState;
  /** The whole configuration, defaults filled in, with the seed that was chosen. */
  config: Record<string, unknown>;
  /** 0 to 1. */
  progress: number;
  /** When it was submitted. */
  created_at: string;
  /** When its first run began. */
  started_at: string | null;
  /** When it ended. */
  ended_at: string | null;
  /** Set aside. */
  archived: boolean;
  /** Submitted with `test`. */
  test_mode: boolean;
  /** Id of the original. */
  forked_from: number | null;
  /** Uuid of the checkpoint whose weights its trials begin with. */
  source_checkpoint: string | null;
  /** How trials are chosen. */
  searcher_name: string;
  /** By which validation metric they are compared; null for a single trial that names none. */
  metric: string | null;
  /** Which way they are compared. */
  smaller_is_better: boolean;
  /** How many there are by now. */
  num_trials: number;
  /** How many of them ended with an error. */
  failed_trials: number;
  /** How many of them were canceled. */
  canceled_trials: number;
  /** The best trial by now. */
  best_trial_id: number | null;
  /** Its metric. */
  best_validation: Num | null;
  /** Why none of its trials runs, while it is `ACTIVE`; else null. */
  waiting_reason: string | null;
  /** One line, when the state is `ERROR` or no trial has a result; the logs have the traceback. */
  error: string | null;
  /** Why it ended without a result, also when it is `COMPLETED`: every trial failed, or none reported a number for the metric; else null. */
  result_problem: string | null;
  /** Searched hyperparameters that no trial has read; empty while that is not known. */
  unread_hparams: Array<string>;
}

/** One experiment. */
export interface ExperimentAnswer {
  experiment: Experiment;
  /** What a submission came upon that is no reason to refuse it, a line each. */
  warnings: Array<string>;
}

/** Metrics of every experiment's best trial, the oldest experiment first. */
export interface ExperimentColumns {
  /** All metrics that were ever reported. */
  names: Array<MetricName>;
  /** `id` of the experiment, and the metrics that were asked for; null where the trial has none. While no trial is the best one, the first one counts. */
  columns: Record<string, Array<Num | null>>;
}

/** A page of experiments. */
export interface ExperimentPage {
  experiments: Array<Experiment>;
  next_after: string | null;
}

/** State of an experiment. */
export type ExperimentState = "ACTIVE" | "CANCELED" | "COMPLETED" | "ERROR" | "PAUSED" | "STOPPING_CANCELED" | "STOPPING_COMPLETED" | "STOPPING_ERROR" | "STOPPING_KILLED";

/** The server is up and its database answers. */
export interface Health {
  status: "ok";
}

/** How much one hyperparameter matters. */
export interface HparamShare {
  /** Its dotted name. */
  name: string;
  /** Its part in the differences between trials, alone and together with others: 0 for one that does not matter, 1 for one that decides alone. */
  importance: number;
  /** Standard error of that, over the trees. */
  spread: number;
}

/** Which hyperparameters matter for the searcher's metric. */
export interface Importance {
  /** How it was found out, and what that cannot tell. */
  method: string;
  /** How many trials with a result it stands on. */
  trials: number;
  /** How much of the differences between trials the hyperparameters predict for trials that were not learned from: 1 is all, 0 or below nothing. Below 0.2 the shares mean little. */
  explained: number | null;
  /** The one that matters most comes first. */
  shares: Array<HparamShare>;
  /** Why there are none; else null. */
  problem: string | null;
}

/** A validation that was better than all before it. */
export interface Improvement {
  /** When the searcher was told of it. */
  time: string;
  /** Of which trial. */
  trial_id: number;
  /** How far that trial was, in the searcher's unit. */
  length: number | null;
  /** The searcher's metric. */
  value: Num;
}

/** Version and capabilities of the server. */
export interface Info {
  version: string;
  home: string;
  database: "postgresql" | "sqlite";
  started_at: string;
  cluster: Cluster;
}

/** An experiment in the queue. */
export interface Job {
  /** Which one. */
  experiment_id: number;
  /** Its name. */
  name: string;
  /** Where it stands. */
  state: ExperimentState;
  /** The resource pool in which it waits. */
  pool: string;
  /** Place in the queue of its pool, from 1. */
  place: number;
  /** 1 to 99; the smallest is the first to run, unless the pool's policy is `fifo`. */
  priority: number;
  /** Its share of the slots, in a pool with the policy `fair_share`. */
  weight: number;
  /** Most slots that its trials may hold together. */
  max_slots: number | null;
  /** Seconds after which it ends if no trial of it has had slots. */
  queue_time: number | null;
  /** Its labels; a quota may name one. */
  labels: Array<string>;
  /** What one trial of it needs in the pool. */
  slots_per_trial: number;
  /** Slots of its hostfile's machines on which a trial has its ranks, started from the pool's; 0 without a hostfile. */
  host_slots: number;
  /** Those that hold slots. */
  running_trials: number;
  /** Those that wait for slots. */
  queued_trials: number;
  /** Slots of the pool that its runs hold. */
  held_slots: number;
  /** Why its next trial waits, whether or not others run; null when none waits. */
  waiting_reason: string | null;
  /** Which of its trials runs on fewer slots than it was made for, and whether it leaves for more; null when none does. */
  fewer_reason: string | null;
  /** When it was submitted. */
  created_at: string;
}

/** One job. */
export interface JobAnswer {
  job: Job;
}

/** The queue, the first to run first. */
export interface JobPage {
  jobs: Array<Job>;
  next_after: null;
}

/** One line of a log. */
export interface Log {
  /** Number; lines come in the order in which they arrived. */
  id: number;
  /** Whose line it is. */
  trial_id: number | null;
  /** Of which run. */
  run_id: number | null;
  /** Who wrote it; null for the agent and the server. */
  rank: number | null;
  /** Where it was written. */
  stream: "agent" | "server" | "stderr" | "stdout";
  /** `DEBUG`, `INFO`, `WARNING`, `ERROR` or `CRITICAL` where it is known. */
  level: string | null;
  /** The line. */
  text: string;
  /** When it was written. */
  time: string | null;
  /** Host of the agent that sent it; null for the server. */
  host: string | null;
}

/** A page of log lines. */
export interface LogPage {
  logs: Array<Log>;
  next_after: number | null;
}

/** A link that opens the page once. */
export interface LoginLink {
  url: string;
}

/** A metric that a trial has reported. */
export interface MetricName {
  group: string;
  name: string;
}

/** Answer of ``metric-names``. */
export interface MetricNames {
  names: Array<MetricName>;
}

/** Answer of ``metrics``. */
export interface Metrics {
  metrics: Array<Curve>;
}

/** A model of the registry. */
export interface Model {
  /** Its name. */
  name: string;
  /** What it is for. */
  description: string;
  /** When it was added. */
  created_at: string | null;
  /** Its checkpoints, the oldest version first; they are kept until they are taken out. */
  versions: Array<ModelVersion>;
}

/** One model. */
export interface ModelAnswer {
  model: Model;
}

/** A file of a model directory. */
export interface ModelFile {
  /** Inside the directory. */
  path: string;
  /** Of it. */
  size_bytes: number;
}

/** All files of a model directory, by their paths. */
export interface ModelFilePage {
  files: Array<ModelFile>;
  next_after: null;
}

/** All models, by their names. */
export interface ModelPage {
  models: Array<Model>;
  next_after: null;
}

/** A checkpoint of the registry. */
export interface ModelVersion {
  /** From 1; never given twice. */
  version: number;
  /** Its uuid. */
  checkpoint: string;
  /** Whose checkpoint it is. */
  experiment_id: number;
  /** Of which trial. */
  trial_id: number;
  /** Batches that the trial had trained. */
  steps_completed: number;
  /** Of all its files. */
  size_bytes: number;
  /** Validation metrics at that step. */
  metrics: Record<string, Num> | null;
  /** What was said of it when it was registered. */
  notes: string;
  /** When that was. */
  created_at: string | null;
}

/** Agents that are scheduled together. */
export interface Pool {
  /** Given with `zerolab agent start --pool`, and in `resources.resource_pool`. */
  name: string;
  /** In which order its jobs start. */
  policy: "fair_share" | "fifo" | "priority";
  /** Agents in it that are there. */
  agents: number;
  /** Their slots. */
  slots: number;
  /** Slots on which a run could start now. */
  free_slots: number;
  /** Experiments in it that have not ended. */
  jobs: number;
  /** Most slots that its jobs may hold together: its quota. */
  max_slots: number | null;
}

/** One pool. */
export interface PoolAnswer {
  pool: Pool;
}

/** All pools. */
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

/** Most slots that some jobs may hold together. */
export interface Quota {
  /** `pool:NAME` or `label:NAME`. */
  group: string;
  /** The limit. */
  max_slots: number;
  /** Slots that such jobs hold now. */
  held_slots: number;
}

/** One quota. */
export interface QuotaAnswer {
  quota: Quota;
}

/** All quotas. */
export interface QuotaPage {
  quotas: Array<Quota>;
  next_after: null;
}

/** Removed checkpoints, or those that a dry run would remove. */
export interface Removal {
  /** Nothing was done. */
  dry_run: boolean;
  /** What goes of each. */
  checkpoints: Array<RemovedCheckpoint>;
  /** Of all that goes. */
  size_bytes: number;
}

/** What goes of a checkpoint. */
export interface RemovedCheckpoint {
  /** Its name. */
  uuid: string;
  /** Whose state it is. */
  trial_id: number;
  /** Batches that the trial had trained. */
  steps_completed: number;
  /** Whether all of it goes. */
  whole: boolean;
  /** The files that go. */
  files: Array<string>;
  /** Of those files. */
  size_bytes: number;
}

/** One continuous execution of a trial. */
export interface Run {
  /** Number, from 1, over all trials. */
  id: number;
  /** Whose run it is. */
  trial_id: number;
  /** Where it stands. */
  state: RunState;
  /** Names of the agents whose slots it holds or held, the first with the chief; those that were forgotten are left out. */
  agents: Array<string>;
  /** When it was given its slots. */
  created_at: string;
  /** When its ranks were started. */
  started_at: string | null;
  /** When it gave its slots back. */
  ended_at: string | null;
  /** Of its launcher; null while it runs, and where nobody learned it. */
  exit_code: number | null;
  /** Why it ended, where it did not complete. */
  reason: string | null;
  /** Whether it ended with an error. False while it runs, and where it gave its slots back. */
  failed: boolean;
}

/** All runs of a trial, the oldest first. */
export interface RunPage {
  runs: Array<Run>;
  next_after: null;
}

/** State of a run, which holds its slots until it has exited. */
export type RunState = "ASSIGNED" | "EXITED" | "RUNNING";

/** A length at which trials are compared. */
export interface Rung {
  /** Length in the unit of the search. */
  length: number;
  /** Trials on their way to it. */
  training: Array<number>;
  /** Trials that were judged there, best first. */
  entries: Array<RungEntry>;
}

/** A trial that was judged at a rung. */
export interface RungEntry {
  /** Which trial. */
  trial_id: number;
  /** As it was reported; null when it was not a number, or never came. */
  metric: Num | null;
  /** `promoted` went on to the next rung; `paused` waits, and may still go on; `stopped` ended there; `completed` is at the highest rung; `failed` ended early, and ranks last. */
  state: EntryState;
}

/** Something that a searcher must know. */
export interface SearchEvent {
  /** Rising; not without gaps. */
  id: number;
  /** What happened to the trial. */
  kind: "created" | "exited" | "exited_early" | "validated";
  /** The searcher's own number of the trial, as it said at its creation. */
  trial_id: number;
  /** Of `validated`; `NaN` ranks last. */
  metric: Num | null;
  /** Of `validated`: how far the trial was, in the unit of the search. */
  length: number | null;
  /** Of `exited_early`: `errored`, `invalid_hp` or `user_canceled`. */
  reason: string | null;
}

/** Events of a search, the oldest first. */
export interface SearchEvents {
  /** At most 1,000. */
  events: Array<SearchEvent>;
  /** The last event that operations answered; -1 before the first operations, 0 after them. */
  handled: number;
  /** Whether the experiment takes no more operations. */
  over: boolean;
}

/** What operations have answered. */
export interface SearchHandled {
  /** The last event that is answered by now. */
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
  /** Experiment that this time is taken from; null if it was given. */
  like: number | null;
  /** What all trials hold together, for `total_length`; null when a time or a length is unknown. */
  slot_hours: number | null;
  /** The same for `most_length`. */
  most_slot_hours: number | null;
  /** Assumption of the estimate; null if it is exact or unknown. */
  premise: string | null;
  /** Probable mistakes of the search, one line each. */
  warnings: Array<string>;
}

/** The best value so far over time. */
export interface SearchProgress {
  improvements: Array<Improvement>;
  /** How many validations there were, those that were not better too. */
  validations: number;
}

/** A search. */
export interface SearcherAnswer {
  searcher: SearcherState;
}

/** Rungs and trials of a search. */
export interface SearcherState {
  /** Which searcher. */
  name: string;
  /** Unit of all lengths; null if trials decide their lengths. */
  unit: "batches" | "epochs" | null;
  /** By which trials are compared; null for a single trial that names none. */
  metric: string | null;
  /** Which way they are compared. */
  smaller_is_better: boolean;
  /** Whether it wants no more trials. */
  done: boolean;
  /** 0 to 1. */
  progress: number;
  /** Empty for a searcher that compares no trials while they train. */
  brackets: Array<Bracket>;
  /** Why nothing can be said of where the trials stand; null when all is well. */
  problem: string | null;
}

/** A device of an agent. */
export interface Slot {
  /** Number, from 0, on its agent. */
  id: number;
  /** `cpu`, or `cuda:0 NAME`. */
  device: string;
  /** The run that holds it. */
  run_id: number | null;
  /** Whether new runs may start on it, as its owner says. */
  enabled: boolean;
  /** Whether nothing can start on it now, for its agent's cluster has no node for it. */
  down: boolean;
}

/** The configuration of an experiment as it was submitted. */
export interface SubmittedAnswer {
  config: Record<string, unknown>;
}

/** A token: the owner's, or the join token of agents. */
export interface Token {
  token: string;
}

/** One choice of hyperparameters. */
export interface Trial {
  /** Number, from 1, over all experiments. */
  id: number;
  /** Whose trial it is. */
  experiment_id: number;
  /** Where it stands. `PAUSED`: it gave its slots back and waits. */
  state: TrialState;
  /** What the searcher chose. */
  hparams: Record<string, unknown>;
  /** What the searcher chose. */
  seed: number;
  /** How often it has failed and been started again. */
  restarts: number;
  /** Batches. */
  steps_completed: number;
  /** 0 to 1. */
  progress: number;
  /** What its run is doing: `starting`, `training`, `validating`, `checkpointing`. */
  activity: string | null;
  /** Why it has no slots, while it is `QUEUED`; while it is `PAUSED`, what its script did wrong where its searcher compares trials; else null. */
  waiting_reason: string | null;
  /** Names of the log policies that have matched its log. */
  labels: Array<string>;
  /** Whether a user has put it away: lists can leave it out. */
  archived: boolean;
  /** Best value of the searcher's metric. */
  best_validation: Num | null;
  /** The batch of that validation. */
  best_steps: number | null;
  /** Latest value of the searcher's metric. */
  latest_validation: Num | null;
  /** What it has cost: slots times the seconds for which its runs have held them, until now. */
  slot_seconds: number;
  /** A uuid. */
  latest_checkpoint: string | null;
  /** A uuid. */
  best_checkpoint: string | null;
  /** The trial whose weights it begins with, where the searcher chose it. */
  source_trial_id: number | null;
  /** Uuid of the checkpoint whose weights it begins with; empty when its source has none. */
  source_checkpoint: string | null;
  /** The run that holds slots for it now. */
  run_id: number | null;
  /** When the searcher asked for it. */
  created_at: string;
  /** When its first run began. */
  started_at: string | null;
  /** When it ended. */
  ended_at: string | null;
  /** One line for the user. */
  error: string | null;
  /** Why it ended without a result, also when it is `COMPLETED` (no validation, or never a number); else null. */
  result_problem: string | null;
}

/** One trial. */
export interface TrialAnswer {
  trial: Trial;
}

/** All trials of an experiment, the oldest first: a list for each column. */
export interface TrialColumns {
  /** `id`, `state` and other fields of a trial by their names, and each hyperparameter as `hparams.` and its dotted name; null where a trial has none. Numbers that are not finite are text, as everywhere. */
  columns: Record<string, Array<number | string | boolean | null>>;
}

/** A page of trials. */
export interface TrialPage {
  trials: Array<Trial>;
  next_after: string | null;
  /** How many there are on all pages. */
  total: number;
}

/** State of a trial. PAUSED: it has released its slots and waits. */
export type TrialState = "CANCELED" | "COMPLETED" | "ERROR" | "PAUSED" | "QUEUED" | "RUNNING" | "STOPPING";
