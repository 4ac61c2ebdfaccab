/** The columns that a table of trials may have, and what stands in them. */

import type { ComponentChildren } from "preact";

import { get } from "../api";
import { look } from "../chart/looks";
import { PREFIX, type Seen, type Value } from "../columns";
import { duration, number, seconds } from "../format";
import { metricColumns } from "../measured";
import { Badge, ENDED, Labels, Progress, Time, Trouble } from "../parts";
import { written } from "../plot/axis";
import type { Experiment, MetricName, MetricNames, Num, Trial } from "../resources";
import { trialAddress } from "../route";

/** The metrics that a trial has reported. */
export const reportedBy = (trial: number | null): Promise<MetricName[]> =>
  trial === null ? Promise.resolve([]) : get<MetricNames>(`/trials/${trial}/metric-names`).then((answer) => answer.names);

export interface Column {
  /** In the browser's memory, and in the server's words where it sorts by it. */
  key: string;
  name: string;
  /** The whole name, where the other one is short for it. */
  whole?: string;
  /** Whether the server sorts by it. */
  sorts: boolean;
  /** The largest comes first when the head is clicked once. */
  falling?: boolean;
  kind?: string;
  cell: (trial: Trial, about: About) => ComponentChildren;
}

/** What a cell knows besides its trial. */
interface About {
  row: Experiment;
  place: number;
  hparams: Seen["hparams"];
  /** Metrics of the trial, by their columns. */
  measured: Record<string, Num>;
}

const figure = (key: string, name: string, cell: Column["cell"], falling = true): Column => ({ key, name, sorts: true, falling, kind: "figure", cell });
const time = (key: "created_at" | "started_at" | "ended_at", name: string): Column => ({ key, name, sorts: false, kind: "figure", cell: (trial) => <Time at={trial[key]} /> });

export const TRIAL: Column = {
  key: "id",
  name: "trial",
  sorts: true,
  kind: "figure",
  cell: (trial, { row, place }) => (
    <>
      <i class="swatch" style={{ background: look(place).color }} /> <a href={trialAddress(trial.id)}>{trial.id}</a>{" "}
      {trial.id === row.best_trial_id && row.num_trials > 1 && <small class="label">best</small>}
    </>
  ),
};

/** All columns that there are: the usual ones first, then those that a reader may ask for. */
export function columns(row: Experiment, varied: string[], others: string[], short: Map<string, string>, metrics: MetricName[]): { known: Column[]; usual: Set<string> } {
  const falling = !row.smaller_is_better;
  const hparam = (name: string): Column => ({
    key: PREFIX + name,
    name: short.get(name) ?? name,
    whole: name,
    sorts: true,
    kind: "figure",
    cell: (_, { hparams }) => (name in hparams ? <Written value={hparams[name]!} /> : <span class="muted">–</span>),
  });
  const usual: Column[] = [
    TRIAL,
    { key: "state", name: "state", sorts: true, kind: "state", cell: (trial) => <State trial={trial} /> },
    figure("steps_completed", "batches", (trial) => number(trial.steps_completed)),
    figure(
      "best_validation",
      "best validation",
      (trial) => (
        <>
          {number(trial.best_validation)} {trial.best_steps !== null && <small class="muted">at batch {number(trial.best_steps)}</small>}
        </>
      ),
      falling,
    ),
    figure("latest_validation", "latest", (trial) => number(trial.latest_validation), falling),
    figure("restarts", "restarts", (trial) => (trial.restarts > 0 ? <b class="warn">{trial.restarts}</b> : 0)),
    ...varied.map(hparam),
    figure("slot_seconds", "slot time", (trial) => seconds(trial.slot_seconds)),
    { key: "took", name: "duration", sorts: false, kind: "figure", cell: (trial) => duration(trial.started_at, trial.ended_at) },
  ];
  const more: Column[] = [
    figure("progress", "progress", (trial) => `${Math.round(100 * trial.progress)} %`),
    { key: "seed", name: "seed", sorts: false, kind: "figure", cell: (trial) => String(trial.seed) },
    time("created_at", "created"),
    time("started_at", "started"),
    time("ended_at", "ended"),
    ...others.map(hparam),
    ...metricColumns(metrics).map(({ key, name, falling }) => figure(key, name, (_, { measured }) => number(measured[key]), falling)),
  ];
  return { known: [...usual, ...more], usual: new Set(usual.map(({ key }) => key)) };
}

function Written({ value }: { value: Value }) {
  const short = written(value);
  return short.endsWith("…") ? <span title={String(value)}>{short}</span> : <>{short}</>;
}

/** Where a trial stands; why it waits, or what went wrong, in one line. */
function State({ trial }: { trial: Trial }) {
  return (
    <div class="line">
      <Badge of={trial} /> {!ENDED.includes(trial.state) && <Progress value={trial.progress} />}
      <Labels labels={trial.labels} />
      <Trouble of={trial} />
    </div>
  );
}
