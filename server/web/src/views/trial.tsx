/** One trial: where it stands and why, its curves, hyperparameters, checkpoints, log and runs. */

import { useEffect, useState } from "preact/hooks";

import { Allowed, useVisitor } from "./users/access";
import { get, post, remove } from "../api";
import { look } from "../chart/looks";
import { leavesOf, seenTrial, spaceOf } from "../columns";
import { Ask, AskChanges, Now } from "../dialog";
import { clock, duration, number, seconds } from "../format";
import { useEvents, useLoaded } from "../live";
import { Badge, Cell, ENDED, Facts, Labels, OneLine, Problem, Progress, Raw, removedValues, Table, Time } from "../parts";
import type { Experiment, Run, RunPage, Trial as Row } from "../resources";
import { address, modelAddress, SHARED_TABS, trialAddress, type TrialTab, TRIAL_TABS } from "../route";
import { Checkpoints, Saved } from "./checkpoints";
import { Board } from "../chart/board";
import { Logs, slots } from "./logs";
import { Media } from "./media";
import { Engine } from "./submitted/engine";
import { useRegistry, type Version } from "./registry/register";

interface Both {
  trial: Row;
  row: Experiment;
}

async function read(id: number): Promise<Both> {
  const { trial } = await get<{ trial: Row }>(`/trials/${id}`);
  const { experiment } = await get<{ experiment: Experiment }>(`/experiments/${trial.experiment_id}`);
  return { trial, row: experiment };
}

export function Trial({ id, tab }: { id: number; tab: TrialTab | null }) {
  const both = useLoaded(`/trials/${id}`, () => read(id));
  if (both.value === null) return both.error ? <Problem text={both.error}><a href="#/experiments">All experiments</a></Problem> : <p class="muted">Loading…</p>;
  return (
    <>
      {both.error && <Problem text={both.error} />}
      <Known {...both.value} tab={tab} refresh={both.reload} update={(trial) => both.update((old) => ({ ...old, trial }))} />
    </>
  );
}

interface Props extends Both {
  tab: TrialTab | null;
  refresh: () => void;
  update: (trial: Row) => void;
}

function Known({ trial, row, tab, refresh, update }: Props) {
  const registry = useRegistry();
  const [ticks, setTicks] = useState({ trial: 0, metric: 0, checkpoint: 0, log: 0 });
  const connected = useEvents(`/experiments/${row.id}/events`, (changes) => {
    const now = changes.trials.get(trial.id);
    if (now) update(now);
    else if (now === null || changes.reload || changes.experiments.has(row.id)) refresh();
    setTicks((t) => ({
      trial: t.trial + Number(now !== undefined || changes.reload),
      metric: t.metric + Number(changes.kinds.has("metric")),
      checkpoint: t.checkpoint + Number(changes.kinds.has("checkpoint")),
      log: t.log + Number(changes.kinds.has("log")),
    }));
  });
  useEffect(() => {
    document.title = `trial ${trial.id} – ${row.name} – Zerolab`;
    return () => {
      document.title = "Zerolab";
    };
  }, [trial.id, row.name]);
  const visitor = useVisitor();
  const shown = visitor && tab === null ? "curves" : tab ?? (trial.state === "ERROR" && trial.steps_completed === 0 ? "logs" : "curves");
  return (
    <>
      <header class="title">
        <h1>
          <small>trial</small> {trial.id} <Badge of={trial} /> <Labels labels={trial.labels} />{" "}
          <small>
            of <a href={address(row.id)}>{row.name}</a>
            {trial.id === row.best_trial_id && row.num_trials > 1 && ", best trial"}
          </small>
        </h1>
        <div class="actions">
          {!connected && <span class="muted">not connected, retrying</span>}
          {connected && !ENDED.includes(trial.state) && <span class="live">live</span>}
          <Deeds trial={trial} row={row} refresh={refresh} />
        </div>
      </header>
      <Noticed trial={trial} row={row} />
      <Overview trial={trial} row={row} versions={registry.versionsOfTrial(trial.id)} tick={ticks.checkpoint + ticks.trial} />
      <nav class="tabs" aria-label="views of this trial">
        {TRIAL_TABS.filter((name) => !visitor || SHARED_TABS.includes(name)).map((name) => (
          <a key={name} href={trialAddress(trial.id, name)} aria-current={shown === name ? "page" : undefined}>
            {name}
          </a>
        ))}
        <span class="chosen">
          <Raw path={`/trials/${trial.id}${RAW[shown]}`} />
        </span>
      </nav>
      {shown === "curves" && (
        <Board
          lines={[{ trial: seenTrial(trial), name: `trial ${trial.id}`, detail: "", look: look(0), best: false, href: trialAddress(trial.id) }]}
          several={false}
          metrics={row.metric ? [row.metric] : []}
          ended={ENDED.includes(trial.state)}
          tick={ticks.metric}
        />
      )}
      {shown === "hyperparameters" && <Hyperparameters trial={trial} row={row} />}
      {shown === "media" && <Media trials={[trial.id]} tick={ticks.trial} />}
      {shown === "checkpoints" && <Checkpoints path={`/trials/${trial.id}`} experiment={row.id} tick={ticks.checkpoint} chosen={[]} registry={registry} />}
      {shown === "logs" && <Logs path={`/trials/${trial.id}`} tick={ticks.log} ranks={slots(row)} several={false} />}
      {shown === "engine" && <Engine trial={trial.id} />}
      {shown === "runs" && <Runs trial={trial} tick={ticks.trial} />}
    </>
  );
}

/** Where the REST API tells what a view shows, behind the trial's own address. */
const RAW: Record<TrialTab, string> = { curves: "/metrics", hyperparameters: "", media: "/media", checkpoints: "/checkpoints", logs: "/logs", runs: "/runs", engine: "/engine" };

/** What is wrong with a trial, or why it does not run. */
function Noticed({ trial, row }: Both) {
  const problem = (trial.result_problem ?? trial.error)?.trim();
  if (problem) return <Problem text={trial.state === "ERROR" ? problem : `No result: ${problem}`} kind={trial.state === "ERROR" ? "bad" : "warned"} />;
  if (trial.waiting_reason) return <Problem text={`Waiting: ${trial.waiting_reason}`} kind="warned" />;
  if (trial.state !== "PAUSED") return null;
  const whole = row.state === "PAUSED" ? "the experiment is paused; activate the experiment" : "paused by a user or by the searcher";
  return <Problem text={`Waiting: ${whole}.`} kind="warned" />;
}

function Deeds({ trial, row, refresh }: Both & { refresh: () => void }) {
  const act = (deed: string) => () => post(`/trials/${trial.id}/${deed}`).then(refresh);
  const ended = ENDED.includes(trial.state);
  return (
    <>
      <Allowed owner={row.owner}>
        {!ended && trial.state !== "PAUSED" && <Now act={act("pause")}>pause</Now>}
        {trial.state === "PAUSED" && <Now act={act("activate")}>activate</Now>}
        {!ended && (
          <>
            <Ask act={act("cancel")} title={`cancel trial ${trial.id}?`} ask="It saves a checkpoint and stops. Other trials continue.">
              cancel
            </Ask>
            <Ask act={act("kill")} final title={`kill trial ${trial.id}?`} ask="It stops immediately, without a checkpoint. Training since the last one is lost.">
              kill
            </Ask>
          </>
        )}
        {(trial.state === "CANCELED" || trial.state === "ERROR") && (
          <Ask act={act("continue")} title={`continue trial ${trial.id}?`} ask="It resumes from its latest checkpoint, or from the start if it has none.">
            continue
          </Ask>
        )}
      </Allowed>
      <Allowed>{trial.latest_checkpoint && <Fork trial={trial.id} />}</Allowed>
      <Allowed owner={row.owner}>
        {ended && <Now act={act(trial.archived ? "unarchive" : "archive")}>{trial.archived ? "unarchive" : "archive"}</Now>}
        {ended && ENDED.includes(row.state) && (
          <Ask
            act={() => remove(`/trials/${trial.id}`).then(() => window.location.replace(address(row.id)))}
            final
            title={`delete trial ${trial.id}?`}
            ask="Its metrics, media, logs and checkpoints are deleted. This cannot be undone."
          >
            delete
          </Ask>
        )}
      </Allowed>
    </>
  );
}

/** Submits a trial as a new experiment, and opens it. */
export function Fork({ trial }: { trial: number }) {
  const act = async (config: unknown) => {
    const { experiment } = await post<{ experiment: Experiment }>(`/trials/${trial}/fork`, { config });
    window.location.hash = address(experiment.id).slice(1);
  };
  return (
    <AskChanges act={act} title={`fork trial ${trial}`} ask={`A new experiment starts from the weights and hyperparameters of trial ${trial}, with these overrides.`} usual="{}">
      fork
    </AskChanges>
  );
}

function Overview({ trial, row, versions, tick }: Both & { versions: Version[]; tick: number }) {
  const rows: [string, preact.ComponentChildren][] = [
    ["progress", <Progress value={trial.progress} />],
    ["batches", number(trial.steps_completed)],
    ["restarts", trial.restarts > 0 ? <b class="warn">{trial.restarts}</b> : "0"],
    ["slot time", seconds(trial.slot_seconds)],
    ["seed", String(trial.seed)],
    ["started", <Time at={trial.started_at} />],
    ["duration", duration(trial.started_at, trial.ended_at)],
  ];
  if (row.metric) {
    const best = (
      <>
        {number(trial.best_validation)}
        {trial.best_steps !== null && <small class="muted"> at batch {number(trial.best_steps)}</small>}
      </>
    );
    rows.splice(1, 0, [`best ${row.metric}`, best], ["latest", number(trial.latest_validation)], ["best checkpoint", <Saved path={`/trials/${trial.id}`} tick={tick} />]);
  }
  if (trial.activity && trial.state === "RUNNING") rows.splice(1, 0, ["activity", trial.activity]);
  if (trial.started_at === null && !ENDED.includes(trial.state)) rows.push(["waiting for", duration(trial.created_at, null)]);
  if (versions.length > 0) {
    const links = versions.map(({ model, version }) => (
      <a key={`${model} ${version}`} class="label" href={modelAddress(model)}>
        {model} {version}
      </a>
    ));
    rows.push(["registered as", <>{links}</>]);
  }
  if (trial.source_trial_id !== null) {
    rows.push(["initial weights from", <a href={trialAddress(trial.source_trial_id)}>trial {trial.source_trial_id}</a>]);
  }
  rows.push(...removedValues(row));
  return <Facts rows={rows} />;
}

function Hyperparameters({ trial, row }: Both) {
  const found = Object.entries(leavesOf(trial.hparams));
  if (found.length === 0) return <p class="muted">No hyperparameters.</p>;
  return (
    <Table head={["hyperparameter", "value", "search space"].map((name) => <th key={name}>{name}</th>)}>
      {found.map(([name, value]) => (
        <tr key={name}>
          <Cell kind="name">{name}</Cell>
          <Cell name="value" kind="figure">
            {typeof value === "number" ? <span title={String(value)}>{number(value)}</span> : String(value)}
          </Cell>
          <Cell name="search space">{spaceOf(row.config, name) ?? <span class="muted">constant</span>}</Cell>
        </tr>
      ))}
    </Table>
  );
}

const RUN_HEADS = ["run", "state", "agents", "scheduled", "started", "ended", "duration", "exit code", "exit reason"];

function Runs({ trial, tick }: { trial: Row; tick: number }) {
  const path = `/trials/${trial.id}/runs`;
  const found = useLoaded(path, () => get<RunPage>(path).then((answer) => answer.runs), tick);
  if (found.value === null) return found.error ? <Problem text={found.error} /> : <p class="muted">Loading…</p>;
  if (found.value.length === 0) return <p class="muted">Not scheduled yet.</p>;
  return (
    <Table head={RUN_HEADS.map((name) => <th key={name}>{name}</th>)}>
      {[...found.value].reverse().map((run) => (
        <RunLine key={run.id} run={run} />
      ))}
    </Table>
  );
}

function RunLine({ run }: { run: Run }) {
  return (
    <tr>
      <Cell name="run" kind="figure">
        {run.id}
      </Cell>
      <Cell>
        <Badge of={run} />
      </Cell>
      <Cell name="agents">{run.agents.join(", ") || <span class="muted">removed</span>}</Cell>
      <Cell name="scheduled" kind="figure">
        {clock(run.created_at)}
      </Cell>
      <Cell name="started" kind="figure">
        {clock(run.started_at)}
      </Cell>
      <Cell name="ended" kind="figure">
        {clock(run.ended_at)}
      </Cell>
      <Cell name="duration" kind="figure">
        {duration(run.started_at, run.ended_at)}
      </Cell>
      <Cell name="exit code" kind="figure">
        {run.failed || run.exit_code === 0 ? number(run.exit_code) : "–"}
      </Cell>
      <Cell name="exit reason">
        {run.reason !== null ? <OneLine text={run.reason} kind={run.failed ? "problem" : "waiting"} /> : run.state !== "EXITED" ? "" : run.exit_code === 0 ? "finished" : "–"}
      </Cell>
    </tr>
  );
}
