/** One experiment: curves of its trials, the trials, the checkpoints, the logs, the configuration. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { Allowed, useVisitor } from "./users/access";
import { get, post, remove } from "../api";
import { places } from "../chart/looks";
import { type Seen, seen, seenTrial } from "../columns";
import type { Experiment as Row, Trial, TrialColumns } from "../resources";
import { duration, number } from "../format";
import { Ask, AskChanges, Now } from "../dialog";
import { merge, useEvents, useLoaded } from "../live";
import { Badge, ENDED, Facts, Labels, Lazy, Problem, Progress, Raw, removedValues, Time } from "../parts";
import { address, type OfExperiment, SHARED_TABS, type Tab, TABS, trialAddress } from "../route";
import { Checkpoints, Saved } from "./checkpoints";
import { Curves } from "./curves";
import { Edit } from "./edit";
import { Hyperparameters } from "./hyperparameters";
import { Logs, slots } from "./logs";
import { Media } from "./media";
import { useRegistry } from "./registry/register";
import { Search } from "./search";
import { Code } from "./submitted/code";
import { Configuration } from "./submitted/configuration";
import { Fork } from "./submitted/fork";
import { Trials } from "./trials";

export function Experiment({ id, route }: { id: number; route: OfExperiment }) {
  const path = `/experiments/${id}`;
  const [ticks, setTicks] = useState({ trial: 0, metric: 0, checkpoint: 0, log: 0 });
  const row = useLoaded(path, () => get<{ experiment: Row }>(path).then((answer) => answer.experiment));
  const trials = useLoaded(`${path}/columns`, () => get<TrialColumns>(`${path}/columns`).then(seen));
  const registry = useRegistry();
  const visitor = useVisitor();
  const changed = useRef(new Map<number, Trial | null>());
  const connected = useEvents(`${path}/events`, (changes) => {
    const now = changes.experiments.get(id);
    if (now) row.update(() => now);
    else if (now === null || changes.reload) row.reload();
    if (changes.reload) trials.reload();
    if (changes.trials.size > 0) {
      changed.current = changes.trials;
      trials.update((old) => merge(old, new Map([...changes.trials].map(([key, trial]) => [key, trial && seenTrial(trial)]))));
    }
    setTicks((t) => ({
      trial: t.trial + Number(changes.trials.size > 0),
      metric: t.metric + Number(changes.kinds.has("metric")),
      checkpoint: t.checkpoint + Number(changes.kinds.has("checkpoint")),
      log: t.log + Number(changes.kinds.has("log")),
    }));
  });
  const e = row.value;
  useEffect(() => {
    document.title = e === null ? "Zerolab" : `${e.name} – Zerolab`;
    return () => {
      document.title = "Zerolab";
    };
  }, [e?.name]);
  const at = useMemo(() => places(trials.value ?? []), [trials.value]);
  const problem = row.error ?? trials.error;
  if (e === null || trials.value === null) return problem ? <Problem text={problem}><a href="#/experiments">All experiments</a></Problem> : <p class="muted">Loading…</p>;
  const tab = route.tab ?? (visitor ? "curves" : first(e, trials.value));
  const chosen = trials.value.filter((t) => route.trials.includes(t.id));
  return (
    <>
      {problem && <Problem text={problem} />}
      <Head row={e} connected={connected} refresh={row.reload} />
      <Noticed row={e} trials={trials.value} />
      <Overview row={e} trials={trials.value} tick={ticks.checkpoint + ticks.trial} />
      <nav class="tabs" aria-label="views of this experiment">
        {TABS.filter((name) => !visitor || SHARED_TABS.includes(name)).map((name) => (
          <a key={name} href={address(id, name, route.trials)} aria-current={tab === name ? "page" : undefined}>
            {name}
          </a>
        ))}
        <span class="chosen">
          {chosen.length > 0 && (
            <>
              {chosen.length === 1 ? `trial ${chosen[0]!.id}` : `${chosen.length} trials`} <a href={address(id, tab)}>show all</a>{" "}
            </>
          )}
          <Raw path={raw(id, tab)} />
        </span>
      </nav>
      {tab === "curves" && <Curves row={e} trials={trials.value} at={at} chosen={chosen} tick={ticks.metric} />}
      {tab === "trials" && (
        <Trials
          row={e}
          trials={trials.value}
          at={at}
          chosen={route.trials}
          changed={changed.current}
          tick={ticks.trial}
          refresh={trials.reload}
        />
      )}
      {tab === "search" && <Search row={e} trials={trials.value} at={at} tick={ticks.trial} />}
      {tab === "hyperparameters" && <Hyperparameters row={e} trials={trials.value} at={at} tick={ticks.trial} />}
      {tab === "media" && <Media trials={withMedia(e, trials.value, route.trials)} tick={ticks.trial} />}
      {tab === "checkpoints" && <Checkpoints path={path} experiment={id} tick={ticks.checkpoint} chosen={route.trials} registry={registry} />}
      {tab === "logs" && (
        <Logs
          path={chosen.length === 1 ? `/trials/${chosen[0]!.id}` : path}
          tick={ticks.log}
          ranks={slots(e)}
          several={trials.value.length > 1}
        />
      )}
      {tab === "configuration" && <Configuration row={e} trial={e.best_trial_id ?? trials.value[0]?.id ?? null} />}
      {tab === "code" && <Code row={e} />}
      {!visitor && tab === "curves" && <Lazy load={comments} with={{ id }} quiet />}
    </>
  );
}

const share = () => import("./team").then((module) => module.ShareButton);
const comments = () => import("./team").then((module) => module.Comments);

/** Where the REST API tells what a view shows. */
function raw(id: number, tab: Tab): string {
  const parts: Partial<Record<Tab, string>> = {
    curves: "/metrics/export",
    trials: "/trials",
    search: "/searcher",
    hyperparameters: "/columns",
    checkpoints: "/checkpoints",
    logs: "/logs",
    configuration: "/submitted",
    code: "/files",
  };
  return `/experiments/${id}${parts[tab] ?? ""}`;
}

/** Most trials whose media are shown beside each other. */
const MOST_BESIDE = 6;

/** The chosen trials; else the best one and the first others. */
function withMedia(row: Row, trials: Seen[], chosen: number[]): number[] {
  const ids = chosen.length > 0 ? chosen : [...new Set([row.best_trial_id ?? 0, ...trials.map((trial) => trial.id)])].filter(Boolean).slice(0, 3);
  return ids.slice(0, MOST_BESIDE);
}

/** What is shown where the address names no view: curves, or the log of what never trained. */
function first(row: Row, trials: Seen[]): Tab {
  const trained = trials.some((trial) => trial.steps_completed > 0);
  return row.state === "ERROR" && !trained ? "logs" : "curves";
}

/** What is wrong with an experiment, or why nothing of it runs. */
function Noticed({ row, trials }: { row: Row; trials: Seen[] }) {
  const problem = (row.result_problem ?? row.error)?.trim();
  if (!problem) return row.waiting_reason ? <Problem text={`Not running yet: ${row.waiting_reason}`} kind="warned" /> : null;
  const failed = trials.find((trial) => trial.state === "ERROR");
  const rank = /\brank (\d+)/.exec(problem)?.[1];
  const log = `${address(row.id, "logs", failed ? [failed.id] : []).split("?")[0]}${rank ? `?rank=${rank}` : ""}`;
  return (
    <Problem text={row.state === "ERROR" ? problem : `No result: ${problem}`} kind={row.state === "ERROR" ? "bad" : "warned"}>
      <a href={log}>Logs{rank && ` of rank ${rank}`}</a>
    </Problem>
  );
}

/** What may be made greater, where the searcher has it. */
const BOUNDS = ["max_length", "max_time", "num_rounds", "max_trials"];

/** The change by which an experiment trains on: its bounds, which are to be made greater. */
function longer(row: Row): string {
  const searcher = (row.config.searcher ?? {}) as Record<string, unknown>;
  const given = BOUNDS.filter((name) => searcher[name] != null).map((name) => [name, searcher[name]]);
  return row.state === "COMPLETED" && given.length ? JSON.stringify({ searcher: Object.fromEntries(given) }) : "{}";
}

function Head({ row, connected, refresh }: { row: Row; connected: boolean; refresh: () => void }) {
  const path = `/experiments/${row.id}`;
  const ended = ENDED.includes(row.state);
  const act = (deed: string) => () => post(`${path}/${deed}`).then(refresh);
  const goOn = (config: unknown) => post(`${path}/continue`, { config }).then(refresh);
  return (
    <>
      <header class="title">
        <h1>
          <small>{row.id}</small> {row.name} <Badge of={row} /> <Labels labels={row.labels} />
        </h1>
        <div class="actions">
          {!connected && <span class="muted">not connected, retrying</span>}
          {connected && !ended && <span class="live">live</span>}
          <Allowed>
            <Fork row={row} />
          </Allowed>
          <Allowed owner={row.owner}>
            <Lazy load={share} with={{ ids: [row.id] }} quiet />
          </Allowed>
          <Allowed owner={row.owner}>
            {row.state === "ACTIVE" && row.labels.includes("interactive") && !row.labels.includes("shell") && (
              <a href={`/proxy/${row.id}/`} target="_blank" rel="noreferrer">
                Open
              </a>
            )}
            {row.state === "ACTIVE" && <Now act={act("pause")}>pause</Now>}
            {row.state === "PAUSED" && <Now act={act("activate")}>activate</Now>}
            {!ended && (
              <>
                <Ask act={act("cancel")} title={`cancel experiment ${row.id}?`} ask="Its trials save a checkpoint and stop. The experiment can be continued later.">
                  cancel
                </Ask>
                <Ask act={act("kill")} final title={`kill experiment ${row.id}?`} ask="Its trials stop immediately, without a checkpoint. Training since the last one is lost.">
                  kill
                </Ask>
              </>
            )}
            {ended && (
              <AskChanges
                act={goOn}
                title={`continue experiment ${row.id}`}
                ask="It resumes from its checkpoints with these overrides. Without overrides, failed and stopped trials are retried."
                usual={longer(row)}
              >
                continue
              </AskChanges>
            )}
            <Edit row={row} done={refresh} />
            {ended && <Now act={act(row.archived ? "unarchive" : "archive")}>{row.archived ? "unarchive" : "archive"}</Now>}
            {ended && (
              <Ask
                act={() => remove(path).then(() => window.location.replace("#/"))}
                final
                title={`delete experiment ${row.id}?`}
                ask="Its metrics, media, logs and checkpoints are deleted. This cannot be undone."
              >
                delete
              </Ask>
            )}
          </Allowed>
        </div>
      </header>
      {row.description && <p class="muted description">{row.description}</p>}
      {row.notes && (
        <p class="notes" aria-label="notes">
          {row.notes}
        </p>
      )}
    </>
  );
}

function Overview({ row, trials, tick }: { row: Row; trials: Seen[]; tick: number }) {
  const visitor = useVisitor();
  const best = row.best_trial_id;
  const restarts = trials.reduce((sum, trial) => sum + trial.restarts, 0);
  const running = trials.filter((trial) => trial.state === "RUNNING");
  const doing = running.length === 1 && running[0]!.activity ? running[0]!.activity : null;
  const failedBest = trials.some((trial) => trial.id === best && trial.state === "ERROR");
  const download = `/api/v1/experiments/${row.id}/metrics/export?format=`;
  return (
    <Facts
      rows={[
        ...(row.owner !== null ? ([["owner", row.owner]] as [string, string][]) : []),
        ...(row.project !== null ? ([["project", row.project]] as [string, string][]) : []),
        ["progress", <Progress value={row.progress} />],
        ...(row.metric
          ? ([
              [
                `best ${row.metric}`,
                <>
                  {number(row.best_validation)}
                  {best !== null && trials.length > 1 && (
                    <>
                      {" in "}
                      <a href={trialAddress(best)}>trial {best}</a>
                    </>
                  )}
                  {failedBest && <b class="warn"> (failed)</b>}
                </>,
              ],
              ...(visitor ? [] : [["best checkpoint", <Saved path={`/experiments/${row.id}`} tick={tick} />]]),
            ] as [string, preact.ComponentChildren][])
          : []),
        ["batches", number(trials.length === 1 ? trials[0]!.steps_completed : sumSteps(trials))],
        ["trials", `${number(row.num_trials)}${running.length > 0 ? `, ${running.length} running` : ""}${row.failed_trials > 0 ? `, ${number(row.failed_trials)} failed` : ""}`],
        ...(doing ? ([["activity", doing]] as [string, string][]) : []),
        ...(restarts > 0 ? ([["restarts", <b class="warn">{restarts}</b>]] as [string, preact.ComponentChildren][]) : []),
        ["searcher", row.searcher_name],
        ["started", <Time at={row.started_at} />],
        ["duration", duration(row.started_at, row.ended_at)],
        [
          "export metrics",
          <>
            <a href={`${download}csv`}>CSV</a> <a href={`${download}ndjson`}>NDJSON</a>
          </>,
        ],
        ...removedValues(row),
      ]}
    />
  );
}

function sumSteps(trials: Seen[]): number {
  return trials.reduce((sum, trial) => sum + trial.steps_completed, 0);
}
