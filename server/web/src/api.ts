/** The public REST API, as far as the page reads it. Field names are those of docs/rest.md. */

export interface Experiment {
  id: number;
  name: string;
  description: string;
  labels: string[];
  notes: string;
  state: string;
  config: Record<string, unknown>;
  progress: number;
  created_at: string;
  started_at: string | null;
  ended_at: string | null;
  archived: boolean;
  searcher_name: string;
  metric: string;
  smaller_is_better: boolean;
  num_trials: number;
  best_trial_id: number | null;
  best_validation: Num | null;
  /** Why none of its trials runs, while it is ACTIVE. */
  waiting_reason: string | null;
  error: string | null;
  /** Why it has ended without a result; null when it has one, goes on, or was canceled. */
  result_problem: string | null;
}

/** JSON has no NaN and no infinities: they travel as text. */
export type Num = number | "NaN" | "Infinity" | "-Infinity";

export interface Trial {
  id: number;
  experiment_id: number;
  state: string;
  hparams: Record<string, unknown>;
  restarts: number;
  steps_completed: number;
  progress: number;
  /** What it is doing: starting, training, validating, checkpointing. */
  activity: string | null;
  /** Why it has no slots, while it is QUEUED. */
  waiting_reason: string | null;
  labels: string[];
  best_validation: Num | null;
  best_steps: number | null;
  latest_validation: Num | null;
  latest_checkpoint: string | null;
  best_checkpoint: string | null;
  started_at: string | null;
  ended_at: string | null;
  error: string | null;
  /** Why it has ended without a result; null when it has one, goes on, or was canceled. */
  result_problem: string | null;
}

export interface Series {
  group: string;
  name: string;
  points: [number, Num][];
  /** Step, minimum, maximum and mean of what one pixel stands for; only when points were merged. */
  band?: [number, Num, Num, Num][] | null;
}

export interface Info {
  version: string;
  cluster: { agents: number; slots: number; free_slots: number };
}

export interface Checkpoint {
  uuid: string;
  trial_id: number;
  steps_completed: number;
  state: string;
  size_bytes: number;
  resources: Record<string, number>;
  created_at: string | null;
  path: string;
  metrics: Record<string, Num> | null;
}

export interface LogLine {
  id: number;
  trial_id: number | null;
  rank: number | null;
  stream: string;
  level: string | null;
  text: string;
  time: string | null;
}

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

async function call<T>(method: string, path: string): Promise<T> {
  const answer = await fetch(`/api/v1${path}`, { method, headers: { Accept: "application/json" } });
  if (!answer.ok) {
    const body: { error?: { message?: string } } | null = await answer.json().catch(() => null);
    throw new ApiError(answer.status, body?.error?.message ?? `${answer.status} ${answer.statusText}`);
  }
  return answer.status === 204 ? (undefined as T) : ((await answer.json()) as T);
}

export const get = <T>(path: string): Promise<T> => call<T>("GET", path);
export const post = <T>(path: string): Promise<T> => call<T>("POST", path);

/** All pages of a listing, at most `most` rows. */
export async function all<T>(path: string, key: string, most = 10_000): Promise<T[]> {
  const rows: T[] = [];
  const mark = path.includes("?") ? "&" : "?";
  let after: string | null = null;
  do {
    const cursor: string = after === null ? "" : `&after=${encodeURIComponent(after)}`;
    const page: Record<string, unknown> = await get(`${path}${mark}limit=1000${cursor}`);
    rows.push(...(page[key] as T[]));
    after = page.next_after as string | null;
  } while (after !== null && rows.length < most);
  return rows;
}

export const finite = (value: Num | null | undefined): number | null =>
  typeof value === "number" ? value : null;
