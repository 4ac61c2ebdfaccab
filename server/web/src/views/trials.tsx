/** The trials of an experiment: sorted by any column, chosen for the other views. */

import { useMemo, useState } from "preact/hooks";

import { duration, hparams, number } from "../format";
import { Action, Badge, Cell, ENDED, Progress, Select, Table, Trouble } from "../parts";
import type { Experiment, Trial } from "../resources";
import { address, useChoice } from "../route";
import { type Column, Heads, measured, sorted, useOrder } from "../sorting";
import { MOST_TRIALS } from "./drawn";

const PAGE = 200;
/** Hyperparameters that have a column of their own; the others stand in one cell. */
const MOST_COLUMNS = 5;

const STATES: [string, string, (trial: Trial) => boolean][] = [
  ["", "every state", () => true],
  ["running", "running", (t) => ["RUNNING", "STOPPING"].includes(t.state)],
  ["waiting", "waiting", (t) => ["QUEUED", "PAUSED"].includes(t.state)],
  ["completed", "completed with a result", (t) => t.state === "COMPLETED" && !t.result_problem],
  ["problem", "ended without a result", (t) => Boolean(t.result_problem)],
  ["canceled", "canceled", (t) => t.state === "CANCELED"],
];

function columns(row: Experiment, varied: string[]): Column<Trial>[] {
  const best = !row.smaller_is_better;
  return [
    { name: "trial", value: (t) => t.id },
    { name: "state", value: (t) => t.state },
    { name: "batches", value: (t) => t.steps_completed, falling: true },
    { name: "best validation", value: (t) => measured(t.best_validation), falling: best },
    { name: "latest", value: (t) => measured(t.latest_validation), falling: best },
    { name: "restarts", value: (t) => t.restarts, falling: true },
    ...varied.map((name): Column<Trial> => ({ name, value: (t) => leaf(t.hparams, name) })),
  ];
}

/** The names of the hyperparameters that differ between trials, the first few. */
function varying(trials: Trial[]): string[] {
  const values = new Map<string, Set<string>>();
  for (const trial of trials) {
    for (const [name, value] of hparams(trial.hparams)) values.set(name, (values.get(name) ?? new Set()).add(value));
  }
  return [...values].filter(([, all]) => all.size > 1).map(([name]) => name).slice(0, MOST_COLUMNS);
}

/** A hyperparameter by its dotted name, so that it can be compared. */
function leaf(tree: Record<string, unknown>, name: string): number | string | null {
  const value = name.split(".").reduce<unknown>((node, key) => (node as Record<string, unknown> | null)?.[key], tree);
  if (value === undefined || value === null) return null;
  return typeof value === "number" || typeof value === "string" ? value : JSON.stringify(value);
}

export function Trials(props: { row: Experiment; trials: Trial[]; chosen: number[]; refresh: () => void }) {
  const { row, trials, chosen, refresh } = props;
  const varied = useMemo(() => varying(trials), [trials]);
  const heads = columns(row, varied);
  const [order, sort] = useOrder(heads, { name: "trial", falling: false });
  const [state, setState] = useChoice("state");
  const [most, setMost] = useState(PAGE);
  if (trials.length === 0) return <p class="muted">{row.waiting_reason ?? "No trial yet."}</p>;
  const several = trials.length > 1;
  const inState = STATES.find(([name]) => name === state)?.[2] ?? (() => true);
  const rows = sorted(trials.filter(inState), heads, order);
  const tick = (ids: number[]) => window.location.replace(address(row.id, "trials", ids));
  const toggle = (id: number) => tick(chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id]);
  const fixed = hparams(trials[0]!.hparams).length > varied.length;
  return (
    <section>
      {several && (
        <div class="choice">
          <Select name="state" value={state} options={STATES.map(([name, told]) => [name, told])} choose={setState} />
          <button type="button" onClick={() => tick(rows.slice(0, 10).map((trial) => trial.id))}>
            tick the first {Math.min(10, rows.length)}
          </button>
          {chosen.length > 0 && (
            <>
              <a href={address(row.id, "curves", chosen)}>curves of {chosen.length}</a>
              <button type="button" onClick={() => tick([])}>
                untick
              </button>
            </>
          )}
          <span class="muted">
            Ticked trials alone are shown in the other views, at most {MOST_TRIALS} of them in charts; heads of columns sort.
          </span>
        </div>
      )}
      {rows.length === 0 && <p class="muted">None matches.</p>}
      <Table
        head={
          <>
            {several && <th aria-label="chosen" />}
            <Heads columns={heads} order={order} sort={sort} />
            {fixed && <th>hyperparameters</th>}
            <th>took</th>
            <th aria-label="actions" />
          </>
        }
      >
        {rows.slice(0, most).map((trial) => (
          <Line
            key={trial.id}
            row={row}
            trial={trial}
            varied={varied}
            fixed={fixed}
            chosen={several ? chosen.includes(trial.id) : null}
            toggle={toggle}
            refresh={refresh}
          />
        ))}
      </Table>
      {rows.length > most && (
        <p>
          <button type="button" onClick={() => setMost(most + PAGE)}>
            show more of {number(rows.length)}
          </button>
        </p>
      )}
    </section>
  );
}

interface LineProps {
  row: Experiment;
  trial: Trial;
  /** Hyperparameters with a column. */
  varied: string[];
  /** Whether there are others. */
  fixed: boolean;
  /** Null where there is nothing to choose from. */
  chosen: boolean | null;
  toggle: (id: number) => void;
  refresh: () => void;
}

function Line({ row, trial, varied, fixed, chosen, toggle, refresh }: LineProps) {
  const leaves = hparams(trial.hparams);
  return (
    <tr class={trial.id === row.best_trial_id ? "best" : ""}>
      {chosen !== null && (
        <Cell>
          <input type="checkbox" checked={chosen} aria-label={`trial ${trial.id}`} onChange={() => toggle(trial.id)} />
        </Cell>
      )}
      <Cell name="trial" kind="figure">
        <a href={address(row.id, "curves", [trial.id])}>{trial.id}</a>{" "}
        {trial.id === row.best_trial_id && row.num_trials > 1 && <small class="label">best</small>}
      </Cell>
      <State trial={trial} />
      <Cell name="batches" kind="figure">
        {number(trial.steps_completed)}
      </Cell>
      <Cell name="best validation" kind="figure">
        {number(trial.best_validation)}{" "}
        {trial.best_steps !== null && <small class="muted">at batch {number(trial.best_steps)}</small>}
      </Cell>
      <Cell name="latest" kind="figure">
        {number(trial.latest_validation)}
      </Cell>
      <Cell name="restarts" kind="figure">
        {trial.restarts > 0 ? <b class="warn">{trial.restarts}</b> : 0}
      </Cell>
      {varied.map((name) => (
        <Cell key={name} name={name} kind="figure">
          {leaves.find(([one]) => one === name)?.[1] ?? "–"}
        </Cell>
      ))}
      {fixed && (
        <Cell kind="hparams">
          {leaves
            .filter(([name]) => !varied.includes(name))
            .map(([name, value]) => (
              <span key={name}>
                <i>{name}</i> {value}
              </span>
            ))}
        </Cell>
      )}
      <Cell name="took" kind="figure">
        {duration(trial.started_at, trial.ended_at)}
      </Cell>
      <Cell kind="acts">
        <a href={address(row.id, "logs", [trial.id])}>logs</a>{" "}
        {!ENDED.includes(trial.state) && row.num_trials > 1 && (
          <Action path={`/trials/${trial.id}/kill`} done={refresh} ask={`Stop trial ${trial.id} now?`}>
            kill
          </Action>
        )}
      </Cell>
    </tr>
  );
}

/** Where a trial stands; why it waits, or what went wrong, in one line. */
function State({ trial }: { trial: Trial }) {
  return (
    <Cell kind="state">
      <Badge of={trial} />{" "}
      {!ENDED.includes(trial.state) && <Progress value={trial.progress} />}
      {trial.labels.map((label) => (
        <small class="label" key={label}>
          {label}
        </small>
      ))}
      <Trouble of={trial} />
    </Cell>
  );
}
