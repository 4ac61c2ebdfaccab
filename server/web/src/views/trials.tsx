/** The trials of an experiment: sorted by any column, chosen for the other views. */

import { useState } from "preact/hooks";

import { finite } from "../api";
import type { Experiment, Num, Trial } from "../resources";
import { duration, hparams, number } from "../format";
import { Action, Badge, ENDED, Progress, Table } from "../parts";
import { address } from "../route";

const PAGE = 200;

interface Column {
  name: string;
  value: (trial: Trial) => number | string | null;
}

const measured = (value: Num | null): number | null => finite(value); // what is not finite ranks last

const COLUMNS: Column[] = [
  { name: "trial", value: (t) => t.id },
  { name: "state", value: (t) => t.state },
  { name: "batches", value: (t) => t.steps_completed },
  { name: "best validation", value: (t) => measured(t.best_validation) },
  { name: "latest", value: (t) => measured(t.latest_validation) },
  { name: "restarts", value: (t) => t.restarts },
];

/** Order by a column; what has no value comes last, either way. */
function sorted(trials: Trial[], column: Column, falling: boolean): Trial[] {
  const sign = falling ? -1 : 1;
  return [...trials].sort((a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    if (x === null || y === null) return Number(x === null) - Number(y === null) || a.id - b.id;
    return (x < y ? -sign : x > y ? sign : 0) || a.id - b.id;
  });
}

export function Trials(props: { row: Experiment; trials: Trial[]; chosen: number[]; refresh: () => void }) {
  const { row, trials, chosen, refresh } = props;
  const [order, setOrder] = useState({ name: "trial", falling: false });
  const [most, setMost] = useState(PAGE);
  if (trials.length === 0) return <p class="muted">No trial yet.</p>;
  const column = COLUMNS.find((c) => c.name === order.name)!;
  const rows = sorted(trials, column, order.falling);
  const sort = (name: string) => {
    const best = name === "best validation" || name === "latest";
    const first = best ? !row.smaller_is_better : name === "batches" || name === "restarts";
    setOrder((old) => ({ name, falling: old.name === name ? !old.falling : first }));
  };
  const toggle = (id: number) => {
    const now = chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id];
    window.location.replace(address(row.id, "trials", now));
  };
  return (
    <section>
      {trials.length > 1 && (
        <p class="muted">Tick trials to see only their curves and checkpoints; the heads of the columns sort.</p>
      )}
      <Table
        head={
          <>
            {trials.length > 1 && <th aria-label="chosen" />}
            {COLUMNS.map(({ name }) => (
              <th key={name} aria-sort={order.name !== name ? "none" : order.falling ? "descending" : "ascending"}>
                <button type="button" onClick={() => sort(name)}>
                  {name}
                </button>
              </th>
            ))}
            <th>took</th>
            <th>hyperparameters</th>
            <th aria-label="actions" />
          </>
        }
      >
        {rows.slice(0, most).map((trial) => (
          <Line
            key={trial.id}
            row={row}
            trial={trial}
            chosen={trials.length > 1 ? chosen.includes(trial.id) : null}
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
  /** Null where there is nothing to choose from. */
  chosen: boolean | null;
  toggle: (id: number) => void;
  refresh: () => void;
}

function Line({ row, trial, chosen, toggle, refresh }: LineProps) {
  return (
    <tr class={trial.id === row.best_trial_id ? "best" : ""}>
      {chosen !== null && (
        <td>
          <input type="checkbox" checked={chosen} aria-label={`trial ${trial.id}`} onChange={() => toggle(trial.id)} />
        </td>
      )}
      <td class="figure">
        <a href={address(row.id, "curves", [trial.id])}>{trial.id}</a>{" "}
        {trial.id === row.best_trial_id && row.num_trials > 1 && <small class="label">best</small>}
      </td>
      <td>
        <Badge state={trial.state} /> {!ENDED.includes(trial.state) && <Progress value={trial.progress} />}
        {trial.labels.map((label) => (
          <small class="label" key={label}>
            {label}
          </small>
        ))}
        {trial.error && <Failure text={trial.error.trim()} />}
      </td>
      <td class="figure">{number(trial.steps_completed)}</td>
      <td class="figure">
        {number(trial.best_validation)}{" "}
        {trial.best_steps !== null && <small class="muted">at batch {number(trial.best_steps)}</small>}
      </td>
      <td class="figure">{number(trial.latest_validation)}</td>
      <td class="figure">{trial.restarts > 0 ? <b class="warn">{trial.restarts}</b> : 0}</td>
      <td class="figure">{duration(trial.started_at, trial.ended_at)}</td>
      <td class="hparams">
        {hparams(trial.hparams).map(([name, value]) => (
          <span key={name}>
            <i>{name}</i> {value}
          </span>
        ))}
      </td>
      <td>
        <a href={address(row.id, "logs", [trial.id])}>logs</a>{" "}
        {!ENDED.includes(trial.state) && row.num_trials > 1 && (
          <Action path={`/trials/${trial.id}/kill`} done={refresh} ask={`Stop trial ${trial.id} now?`}>
            kill
          </Action>
        )}
      </td>
    </tr>
  );
}

/** The first line of an error; the others on demand. */
function Failure({ text }: { text: string }) {
  const [first, ...others] = text.split("\n");
  if (others.length === 0) return <small class="problem">{first}</small>;
  return (
    <details class="problem">
      <summary>{first}</summary>
      <pre>{others.join("\n")}</pre>
    </details>
  );
}
