/** The resources of the REST API. Made from the server's structs, not by hand:
 * python -m zeroserver.api.generate
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
  /** Whether it asks for work. */
  alive: boolean;
  /** Its devices: `id`, `device`, and `run_id` of the run that holds it. */
  slots: Array<Slot>;
  /** When it registered, the last time. */
  registered_at: string;
}

/** All agents. */
export interface AgentPage {
  agents: Array<Agent>;
  next_after: null;
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
  /** Whether its files are there. */
  state: "COMPLETED" | "DELETED" | "ERROR";
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
  /** Its directory. */
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
}

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
  /** How trials are chosen. */
  searcher_name: string;
  /** By which validation metric they are compared. */
  metric: string;
  /** Which way they are compared. */
  smaller_is_better: boolean;
  /** How many there are by now. */
  num_trials: number;
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
}

/** One experiment. */
export interface ExperimentAnswer {
  experiment: Experiment;
}

/** A page of experiments. */
export interface ExperimentPage {
  experiments: Array<Experiment>;
  next_after: string | null;
}

/** Where an experiment stands. */
export type ExperimentState = "ACTIVE" | "CANCELED" | "COMPLETED" | "ERROR" | "PAUSED" | "STOPPING_CANCELED" | "STOPPING_COMPLETED" | "STOPPING_ERROR" | "STOPPING_KILLED";

/** The server is up and its database answers. */
export interface Health {
  status: "ok";
}

/** What this server is. */
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
  /** The smallest is the first to run. */
  priority: number | null;
  /** Its share of the slots. */
  weight: number;
  /** What one trial of it needs. */
  slots_per_trial: number;
  /** Those that hold slots. */
  running_trials: number;
  /** Those that wait for slots. */
  queued_trials: number;
  /** Slots that its runs hold. */
  held_slots: number;
  /** Why none of its trials runs, while it is `ACTIVE`; else null. */
  waiting_reason: string | null;
  /** When it was submitted. */
  created_at: string;
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

/** A device of an agent. */
export interface Slot {
  /** Number, from 0, on its agent. */
  id: number;
  /** `cpu`, or `cuda:0 NAME`. */
  device: string;
  /** The run that holds it. */
  run_id: number | null;
}

/** The owner's token. */
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
  /** Why it has no slots, while it is `QUEUED`; else null. */
  waiting_reason: string | null;
  /** Names of the log policies that have matched its log. */
  labels: Array<string>;
  /** Best value of the searcher's metric. */
  best_validation: Num | null;
  /** The batch of that validation. */
  best_steps: number | null;
  /** Latest value of the searcher's metric. */
  latest_validation: Num | null;
  /** A uuid. */
  latest_checkpoint: string | null;
  /** A uuid. */
  best_checkpoint: string | null;
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

/** A page of trials. */
export interface TrialPage {
  trials: Array<Trial>;
  next_after: string | null;
}

/** Where a trial stands. PAUSED: it gave its slots back and waits. */
export type TrialState = "CANCELED" | "COMPLETED" | "ERROR" | "PAUSED" | "QUEUED" | "RUNNING" | "STOPPING";
