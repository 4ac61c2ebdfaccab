/** Several experiments beside each other: their curves in the same charts, and what differs. */

import { useMemo, useState } from "preact/hooks";

import { get } from "../api";
import { look, PLAIN_LOOKS } from "../chart/looks";
import { leavesOf, type Value, seenTrial } from "../columns";
import { duration, number } from "../format";
import { useEvents, useEvery, useLoaded } from "../live";
import { Badge, Cell, ENDED, Lazy, Problem, Raw, Select, Table, Time, Trouble } from "../parts";
import type { Experiment, Trial, TrialPage } from "../resources";
import { address, compareAddress, trialAddress, useChoice } from "../route";
import { Allowed, useVisitor } from "./users/access";
import { Board } from "../chart/board";
import { type Line, MOST_TRIALS } from "../chart/drawn";
import { Media } from "./media";

const share = () => import("./team").then((module) => module.ShareButton);
const views = () => import("./team").then((module) => module.Views);

/** Interval between two reads of growing curves. */
const LOOK_MS = 5000;

const EACH: [string, string][] = [
  ["1", "Best trial of each"],
  ["3", "Best 3 trials of each"],
  ["10", "Best 10 trials of each"],
];

/** Most trials whose media are shown beside each other. */
const MOST_BESIDE = 6;

/** Keys of a configuration that say who it is, not what it does. */
const NAMES = ["name", "description", "labels"];

interface One {
  row: Experiment;
  /** The best first. */
  trials: Trial[];
}

async function read(ids: number[], each: number): Promise<{ found: One[]; problems: string[] }> {
  const asked = ids.map(async (id): Promise<One> => {
    const [{ experiment }, { trials }] = await Promise.all([
      get<{ experiment: Experiment }>(`/experiments/${id}`),
      get<TrialPage>(`/experiments/${id}/trials?sort=metric&limit=${each}`),
    ]);
    return { row: experiment, trials };
  });
  const answers = await Promise.allSettled(asked);
  const failed = answers.flatMap((answer) => (answer.status === "rejected" ? [answer.reason as Error] : []));
  if (failed.length === ids.length && failed.length > 0) throw failed[0];
  const found = answers.flatMap((answer) => (answer.status === "fulfilled" ? [answer.value] : []));
  return { found, problems: failed.map((problem) => problem.message) };
}

export function Compare({ ids }: { ids: number[] }) {
  const [wish, setEach] = useChoice("each", "1");
  const each = EACH.some(([count]) => count === wish) ? Number(wish) : 1;
  const [tick, setTick] = useState(0);
  const both = useLoaded("compare", () => read(ids, each), `${ids.join()} ${each} ${tick}`);
  const found = both.value?.found ?? [];
  const goesOn = found.some(({ row }) => !ENDED.includes(row.state));
  const visitor = useVisitor();
  useEvents(visitor ? null : "/events", (changes) => (changes.reload || ids.some((id) => changes.experiments.has(id))) && setTick((t) => t + 1), 1000);
  useEvery(LOOK_MS, () => setTick((t) => t + 1), goesOn);
  const { shown, all } = useMemo(() => linesOf(found), [both.value]);
  if (both.value === null && !both.error) return <p class="muted">Loading…</p>;
  const metrics = [...new Set(found.flatMap(({ row }) => row.metric ?? []))];
  return (
    <>
      {both.error && <Problem text={both.error} />}
      {both.value?.problems.map((problem) => <Problem key={problem} text={problem} />)}
      <header class="title">
        <h1>Compare experiments</h1>
        <div class="actions">
          {!visitor && <Add ids={ids} />}
          <Allowed>
            <Lazy load={share} with={{ ids }} quiet />
          </Allowed>
          {!visitor && <Lazy load={views} with={{ columns: null }} quiet />}
        </div>
      </header>
      {found.length < 2 && <p class="muted">Select at least two experiments in the list, or enter their IDs.</p>}
      {metrics.length > 1 && <Problem text={`The experiments have different metrics: ${metrics.join(", ")}. Their best values cannot be compared.`} kind="warned" />}
      {found.length > 0 && (
        <>
          <Board
            lines={shown}
            several
            metrics={metrics}
            ended={!goesOn}
            tick={tick}
            note={
              <>
                <Select name="trials of each experiment" value={String(each)} options={EACH} choose={setEach} />
                {shown.length < all && <span class="warn">{shown.length} of {all} trials (maximum per chart: {MOST_TRIALS})</span>}
              </>
            }
          />
          <Standing found={found} ids={ids} />
          <Differences found={found} />
          <Media trials={shown.slice(0, MOST_BESIDE).map((line) => line.trial.id)} tick={tick} quiet />
        </>
      )}
    </>
  );
}

/** A colour for each experiment, a dash for each of its trials: the best has a whole line.
 *
 * Where there are too many, the worse of each are left out.
 */
function linesOf(found: One[]): { shown: Line[]; all: number } {
  const ranked = found.flatMap(({ row, trials }, place) =>
    trials.map((trial, rank) => ({
      place,
      rank,
      line: {
        trial: seenTrial(trial),
        name: `${row.id} ${row.name}`,
        detail: `trial ${trial.id}`,
        look: look(place % PLAIN_LOOKS, rank),
        best: false,
        href: trialAddress(trial.id),
      },
    })),
  );
  const best = [...ranked].sort((a, b) => a.rank - b.rank).slice(0, MOST_TRIALS);
  return { shown: best.sort((a, b) => a.place - b.place).map(({ line }) => line), all: ranked.length };
}

function Add({ ids }: { ids: number[] }) {
  const [text, setText] = useState("");
  const number = Number(text);
  const good = /^[1-9]\d{0,14}$/.test(text.trim()) && !ids.includes(number);
  const add = (event: Event) => {
    event.preventDefault();
    if (!good) return;
    setText("");
    window.location.hash = compareAddress([...ids, number]).slice(1);
  };
  return (
    <form class="choice" onSubmit={add}>
      <input inputMode="numeric" size={8} aria-label="ID of another experiment" placeholder="number" value={text} onInput={(e) => setText(e.currentTarget.value)} />
      <button type="submit" disabled={!good}>
        add experiment
      </button>
    </form>
  );
}

const HEADS = ["experiment", "state", "best", "trial", "batches", "trials", "searcher", "started", "duration", ""];

function Standing({ found, ids }: { found: One[]; ids: number[] }) {
  return (
    <Table head={HEADS.map((name) => (name ? <th key={name}>{name}</th> : <th key="actions" aria-label="actions" />))}>
      {found.map(({ row, trials: [best] }, place) => (
        <tr key={row.id}>
          <Cell kind="name">
            <div class="line">
              <i class="swatch" style={{ background: look(place % PLAIN_LOOKS).color }} /> {row.id} <a href={address(row.id)}>{row.name}</a>
              <Trouble of={row} />
            </div>
          </Cell>
          <Cell>
            <Badge of={row} />
          </Cell>
          <Cell name="best" kind="figure">
            {number(row.best_validation)} <small class="muted">{row.metric}</small>
          </Cell>
          <Cell name="trial" kind="figure">
            {row.best_trial_id === null ? "–" : <a href={trialAddress(row.best_trial_id)}>{row.best_trial_id}</a>}
          </Cell>
          <Cell name="batches" kind="figure">
            {number(best?.steps_completed)}
          </Cell>
          <Cell name="trials" kind="figure">
            {number(row.num_trials)}
          </Cell>
          <Cell name="searcher">{row.searcher_name}</Cell>
          <Cell name="started" kind="figure">
            <Time at={row.started_at} />
          </Cell>
          <Cell name="duration" kind="figure">
            {duration(row.started_at, row.ended_at)}
          </Cell>
          <Cell kind="acts">
            <a href={compareAddress(ids.filter((id) => id !== row.id))} aria-label={`remove experiment ${row.id}`}>
              remove
            </a>{" "}
            <Raw path={`/experiments/${row.id}`} />
          </Cell>
        </tr>
      ))}
    </Table>
  );
}

/** What is not the same in all configurations, and in what their best trials were started with. */
function Differences({ found }: { found: One[] }) {
  const [every, setEvery] = useChoice("settings");
  const all = useMemo(() => differences(found), [found]);
  const wanted = all.filter((setting) => !minor(setting));
  const rows = every ? all : wanted;
  if (found.length < 2) return null;
  if (all.length === 0) return <p class="muted">The configurations are identical.</p>;
  return (
    <details class="differ" open>
      <summary>
        {number(wanted.length)} {wanted.length === 1 ? "setting differs" : "settings differ"}
      </summary>
      {all.length > wanted.length && (
        <div class="choice">
          <label title="Seeds, and values that are empty or zero in one experiment and not set in another">
            <input type="checkbox" checked={every !== ""} onChange={(e) => setEvery(e.currentTarget.checked ? "all" : "")} /> Show all ({number(all.length)})
          </label>
        </div>
      )}
      <Table
        head={
          <>
            <th>setting</th>
            {found.map(({ row }) => (
              <th key={row.id}>
                {row.id} {row.name}
              </th>
            ))}
          </>
        }
      >
        {rows.map(([name, values]) => (
          <tr key={name}>
            <Cell kind="name">{name}</Cell>
            {values.map((value, at) => (
              <td key={at} class={value === values[0] ? "" : "other"} data-name={String(found[at]!.row.id)} title={String(value ?? "")}>
                {value === undefined ? <span class="muted">not set</span> : String(value ?? "–")}
              </td>
            ))}
          </tr>
        ))}
      </Table>
    </details>
  );
}

type Setting = [string, (Value | undefined)[]];

/** Whether a setting says little: a seed, or not set in one experiment and empty in the others. */
function minor([name, values]: Setting): boolean {
  return /(?:^|[._])seed$/.test(name) || values.every((value) => !value || value === "[]" || value === "{}");
}

function differences(found: One[]): Setting[] {
  const settings = found.map(({ row, trials: [best] }) => {
    const { hyperparameters, ...config } = leaveOut(row.config, NAMES);
    return { ...leavesOf(config), ...leavesOf({ hyperparameters: best?.hparams ?? hyperparameters }) };
  });
  const names = [...new Set(settings.flatMap((each) => Object.keys(each)))];
  return names
    .map((name): Setting => [name, settings.map((each) => each[name])])
    .filter(([, values]) => values.some((value) => value !== values[0]));
}

function leaveOut(config: Record<string, unknown>, names: string[]): Record<string, unknown> {
  return Object.fromEntries(Object.entries(config).filter(([name]) => !names.includes(name)));
}
