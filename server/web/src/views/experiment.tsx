/** One experiment: curves of its trials, the trials, the checkpoints, the logs, the configuration. */

import { useState } from "preact/hooks";

import { all, get, type Checkpoint, type Experiment as Row, type Trial } from "../api";
import { bytes, clock, duration, hparams, number } from "../format";
import { useEvents, useLoaded } from "../live";
import { Action, Badge, Facts, Problem, Progress } from "../parts";
import { Curves } from "./curves";
import { Logs } from "./logs";

const TABS = ["curves", "trials", "checkpoints", "logs", "configuration"] as const;
const ENDED = ["COMPLETED", "CANCELED", "ERROR"];

export function Experiment({ id }: { id: number }) {
  const path = `/experiments/${id}`;
  const [tab, setTab] = useState<(typeof TABS)[number]>("curves");
  const [chosen, setChosen] = useState<number | null>(null);
  const [ticks, setTicks] = useState({ metric: 0, checkpoint: 0, log: 0 });
  const row = useLoaded(path, () => get<{ experiment: Row } | Row>(path).then((r) => ("experiment" in r ? r.experiment : r)));
  const trials = useLoaded(`${path}/trials`, () => all<Trial>(`${path}/trials`, "trials"));
  const connected = useEvents(`${path}/events`, (kinds) => {
    if (kinds.has("experiment")) row.reload();
    if (kinds.has("trial")) trials.reload();
    setTicks((t) => ({
      metric: t.metric + Number(kinds.has("metric")),
      checkpoint: t.checkpoint + Number(kinds.has("checkpoint")),
      log: t.log + Number(kinds.has("log")),
    }));
  });
  const refresh = () => {
    row.reload();
    trials.reload();
  };
  const problem = row.error ?? trials.error;
  if (problem) return <Problem text={problem} />;
  const e = row.value;
  if (e === null || trials.value === null) return <p class="muted">Reading…</p>;
  const shown = chosen === null ? trials.value : trials.value.filter((t) => t.id === chosen);
  return (
    <>
      <header class="title">
        <h1>
          <small>{e.id}</small> {e.name} <Badge state={e.state} />
        </h1>
        <div class="actions">
          <span class="muted">{connected ? "live" : "not connected"}</span>
          {e.state === "ACTIVE" && <Action path={`${path}/pause`} done={refresh}>pause</Action>}
          {e.state === "PAUSED" && <Action path={`${path}/activate`} done={refresh}>activate</Action>}
          {!ENDED.includes(e.state) && (
            <>
              <Action path={`${path}/cancel`} done={refresh}>cancel</Action>
              <Action path={`${path}/kill`} done={refresh} ask="Stop its trials now, without a checkpoint?">kill</Action>
            </>
          )}
        </div>
      </header>
      {e.error && <Problem text={e.error} />}
      <Facts
        rows={[
          ["progress", <Progress value={e.progress} state={e.state} />],
          [`best ${e.metric}`, number(e.best_validation)],
          ["searcher", e.searcher_name],
          ["trials", e.num_trials],
          ["started", clock(e.started_at)],
          ["took", duration(e.started_at, e.ended_at)],
        ]}
      />
      <nav class="tabs" role="tablist">
        {TABS.map((name) => (
          <button type="button" role="tab" aria-selected={tab === name} key={name} onClick={() => setTab(name)}>
            {name}
          </button>
        ))}
        {trials.value.length > 1 && (
          <select aria-label="trial" value={chosen ?? ""} onChange={(x) => setChosen(Number(x.currentTarget.value) || null)}>
            <option value="">all trials</option>
            {trials.value.map((t) => (
              <option value={t.id} key={t.id}>
                trial {t.id}
              </option>
            ))}
          </select>
        )}
      </nav>
      {tab === "curves" && <Curves trials={shown} tick={ticks.metric} />}
      {tab === "trials" && <Trials trials={shown} />}
      {tab === "checkpoints" && <Checkpoints path={path} tick={ticks.checkpoint} trial={chosen} />}
      {tab === "logs" && <Logs path={chosen === null ? path : `/trials/${chosen}`} tick={ticks.log} />}
      {tab === "configuration" && <pre class="config">{JSON.stringify(e.config, null, 2)}</pre>}
    </>
  );
}

function Trials({ trials }: { trials: Trial[] }) {
  return (
    <table class="rows">
      <thead>
        <tr>
          <th>trial</th>
          <th>state</th>
          <th>batches</th>
          <th>best validation</th>
          <th>latest</th>
          <th>restarts</th>
          <th>took</th>
          <th>hyperparameters</th>
        </tr>
      </thead>
      <tbody>
        {trials.map((t) => (
          <tr key={t.id}>
            <td>{t.id}</td>
            <td>
              <Badge state={t.state} />
              {t.error && <small class="error">{t.error.split("\n")[0]}</small>}
            </td>
            <td>{number(t.steps_completed)}</td>
            <td>{number(t.best_validation)}</td>
            <td>{number(t.latest_validation)}</td>
            <td>{t.restarts}</td>
            <td>{duration(t.started_at, t.ended_at)}</td>
            <td class="hparams">
              {hparams(t.hparams).map(([name, value]) => (
                <span key={name}>
                  <i>{name}</i> {value}
                </span>
              ))}
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Checkpoints({ path, tick, trial }: { path: string; tick: number; trial: number | null }) {
  const list = useLoaded(`${path}/checkpoints#${tick}`, () => all<Checkpoint>(`${path}/checkpoints`, "checkpoints"));
  if (list.error) return <Problem text={list.error} />;
  if (list.value === null) return <p class="muted">Reading…</p>;
  const rows = list.value.filter((c) => trial === null || c.trial_id === trial);
  if (rows.length === 0) return <p class="muted">No checkpoint yet.</p>;
  return (
    <table class="rows">
      <thead>
        <tr>
          <th>checkpoint</th>
          <th>trial</th>
          <th>batches</th>
          <th>state</th>
          <th>size</th>
          <th>validation</th>
          <th>saved</th>
        </tr>
      </thead>
      <tbody>
        {rows.map((c) => (
          <tr key={c.uuid}>
            <td>
              <code>{c.uuid}</code>
            </td>
            <td>{c.trial_id}</td>
            <td>{number(c.steps_completed)}</td>
            <td>
              <Badge state={c.state} />
            </td>
            <td>{bytes(c.size_bytes)}</td>
            <td>{Object.entries(c.metrics ?? {}).map(([k, v]) => `${k} ${number(v)}`).join(", ") || "–"}</td>
            <td>{clock(c.created_at)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
