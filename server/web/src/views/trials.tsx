/** The trials of an experiment: sorted and filtered by any column, chosen for the other views. */

import { useMemo, useRef, useState } from "preact/hooks";

import { Bulk, type Deed } from "../bulk";
import { Chooser, useColumns } from "../chooser";
import { type Condition, heads as shortHeads, PREFIX, type Seen, seenTrial, varying, metricOf } from "../columns";
import { number } from "../format";
import { useLoaded } from "../live";
import { METRIC, useMeasured } from "../measured";
import { Cell, ENDED, Problem, Select } from "../parts";
import { written } from "../plot/axis";
import type { Experiment, Num, Trial } from "../resources";
import { address, parse, trialAddress, useChoice } from "../route";
import { MOST_TRIALS } from "../chart/drawn";
import { Filters, useConditions } from "./filters";
import { Fork } from "./trial";
import { usePages } from "./pages";
import { type Column, columns, reportedBy, TRIAL } from "./trialcolumns";

/** Rows that are drawn all at once; of more, those that are in sight. */
const ALL_ROWS = 150;
const ROW = 36; // pixels of a row, as the style sheet says
const AROUND = 20;
const AHEAD = 200;

const STATES: [string, string, Condition[]][] = [
  ["", "All states", []],
  ["running", "Running", [["state", "in", ["RUNNING", "STOPPING"]]]],
  ["waiting", "Waiting", [["state", "in", ["QUEUED", "PAUSED"]]]],
  ["completed", "Completed", [["result", "=", "yes"]]],
  ["problem", "No result", [["result", "=", "no"]]],
  ["canceled", "Canceled", [["state", "=", "CANCELED"]]],
];

const DEEDS: Deed[] = [
  { name: "pause", ask: "They save a checkpoint and release their slots until they are activated." },
  { name: "activate", ask: "They resume when slots are free." },
  { name: "cancel", ask: "They save a checkpoint and stop." },
  { name: "continue", ask: "Failed and stopped trials resume from their checkpoints." },
  { name: "kill", ask: "They stop immediately, without a checkpoint.", final: true },
  { name: "archive", ask: "They are hidden from the list. Their data is kept." },
  { name: "unarchive", ask: "They are shown in the list again." },
  { name: "delete", ask: "Their metrics, logs and checkpoints are deleted. This cannot be undone.", final: true },
];

interface TrialsProps {
  row: Experiment;
  trials: Seen[];
  at: Map<number, number>;
  chosen: number[];
  changed: Map<number, Trial | null>;
  tick: number;
  refresh: () => void;
}

export function Trials({ row, trials, at, chosen, changed, tick, refresh }: TrialsProps) {
  const varied = useMemo(() => varying(trials), [trials]);
  const [state, setState] = useChoice("state");
  const [where] = useConditions();
  const [archived, setArchived] = useChoice("archived");
  const [sort, setSort] = useChoice("sort", "id");
  const all = [...where, ...(STATES.find(([name]) => name === state)?.[2] ?? [])];
  const several = trials.length > 1;
  const hidden = trials.filter((trial) => trial.archived).length;
  const query = `&sort=${encodeURIComponent(sort)}${several && archived === "" ? "&archived=false" : ""}${all.length === 0 ? "" : `&where=${encodeURIComponent(JSON.stringify(all))}`}`;
  const pages = usePages(`/experiments/${row.id}`, query, changed, tick);
  const [oldest] = trials;
  const reported = useLoaded(`names ${row.id}`, () => reportedBy(row.best_trial_id ?? oldest?.id ?? null), Number(row.best_trial_id ?? 0));
  const others = useMemo(() => Object.keys(oldest?.hparams ?? {}).filter((name) => !varied.includes(name)), [oldest, varied]);
  const short = useMemo(() => shortHeads(trials), [trials]);
  const { known, usual } = columns(row, varied, others, short, reported.value ?? []);
  const choice = useColumns("trials", (key) => usual.has(key));
  const heads = known.filter(({ key }) => key === TRIAL.key || choice.shown(key));
  const metrics = heads.map(({ key }) => key).filter((key) => METRIC.test(key));
  const measured = useMeasured(`/experiments/${row.id}/columns`, metrics, tick);
  if (trials.length === 0) return <p class="muted">{row.waiting_reason ?? "No trials yet."}</p>;
  const tickAll = (ids: number[]) => window.location.replace(address(row.id, "trials", ids));
  const toggle = (id: number) => {
    const now = parse(window.location.hash); // a second tick may come before the first one is shown
    const ticked = now.page === "experiment" ? now.trials : chosen;
    tickAll(ticked.includes(id) ? ticked.filter((one) => one !== id) : [...ticked, id]);
  };
  const byId = new Map(trials.map((trial) => [trial.id, trial]));
  const fits = (deed: string, id: number) => {
    const now = byId.get(id)?.state ?? "";
    if (deed === "archive") return ENDED.includes(now) && !byId.get(id)?.archived;
    if (deed === "unarchive") return Boolean(byId.get(id)?.archived);
    if (deed === "delete") return ENDED.includes(now) && ENDED.includes(row.state);
    if (deed === "continue") return now === "CANCELED" || now === "ERROR";
    return deed === "activate" ? ENDED.includes(now) ? false : now === "PAUSED" : !ENDED.includes(now) && !(deed === "pause" && now === "PAUSED");
  };
  const first = Math.min(10, pages.rows.length);
  return (
    <section>
      {pages.error && <Problem text={pages.error} />}
      {measured.error && <Problem text={measured.error} />}
      {several && (
        <>
          <Filters
            names={varied}
            metrics={metrics}
            metric={metricOf(row)}
            count={pages.total === null ? "" : all.length === 0 ? `${number(pages.total)} trials` : `${number(pages.total)} of ${number(trials.length)} trials`}
          />
          <div class="choice">
            <Select name="state" value={state} options={STATES.map(([name, label]) => [name, label])} choose={setState} />
            {hidden > 0 && (
              <label>
                <input type="checkbox" checked={archived !== ""} onChange={(e) => setArchived(e.currentTarget.checked ? "1" : "")} />{" "}
                Show archived ({number(hidden)})
              </label>
            )}
            {first > 0 && (
              <button type="button" onClick={() => tickAll(pages.rows.slice(0, 10).map((trial) => trial.id))}>
                select first {first}
              </button>
            )}
            {chosen.length > 0 && (
              <>
                <a href={address(row.id, "curves", chosen)}>curves of {chosen.length}</a>
                <button type="button" onClick={() => tickAll([])}>
                  clear selection
                </button>
                <Bulk noun="trial" ids={chosen} deeds={DEEDS} fits={fits} done={refresh} />
              </>
            )}
            {pages.stale && (
              <button type="button" class="reset" onClick={pages.again}>
                Trials have changed: reload
              </button>
            )}
            <Chooser columns={known.filter(({ key }) => key !== TRIAL.key).map(({ key, name, whole }) => [key, whole ?? name])} chosen={choice} />
            <span class="muted">
              Other views show only the selected trials, charts at most {MOST_TRIALS}. Click a column header to sort.
            </span>
          </div>
        </>
      )}
      <Fixed trial={trials[0]!} varied={varied} />
      {pages.total === 0 && <p class="muted">No matches.</p>}
      {pages.total === null && !pages.error && <p class="muted">Loading…</p>}
      {(pages.total ?? 0) > 0 && (
        <Rows
          row={row}
          heads={heads}
          measured={measured.at}
          rows={pages.rows}
          total={pages.total!}
          reach={pages.reach}
          sort={sort}
          setSort={setSort}
          at={at}
          chosen={several ? chosen : null}
          toggle={toggle}
        />
      )}
    </section>
  );
}

/** What all trials were started with. */
function Fixed({ trial, varied }: { trial: Seen; varied: string[] }) {
  const fixed = Object.entries(trial.hparams).filter(([name]) => !varied.includes(name));
  if (fixed.length === 0) return null;
  return (
    <p class="muted hparams fixed">
      {varied.length > 0 ? "All trials: " : "Hyperparameters: "}
      {fixed.map(([name, value]) => (
        <span key={name}>
          <i>{name}</i> {written(value)}
        </span>
      ))}
    </p>
  );
}

interface RowsProps {
  row: Experiment;
  heads: Column[];
  measured: (trial: number) => Record<string, Num>;
  rows: Trial[];
  total: number;
  reach: (count: number) => void;
  sort: string;
  setSort: (sort: string) => void;
  at: Map<number, number>;
  /** Null where there is nothing to choose from. */
  chosen: number[] | null;
  toggle: (id: number) => void;
}

/** The table; of a long one only the rows in sight are drawn, and read as far as one has looked. */
function Rows({ row, heads, measured, rows, total, reach, sort, setSort, at, chosen, toggle }: RowsProps) {
  const box = useRef<HTMLDivElement>(null);
  const [top, setTop] = useState(0);
  const [most, setMost] = useState(ALL_ROWS);
  const narrow = window.matchMedia("(max-width: 700px)").matches; // rows are cards there, each of its height
  const virtual = total > ALL_ROWS && !narrow;
  const height = box.current?.clientHeight ?? 700;
  const first = virtual ? Math.max(0, Math.floor(top / ROW) - AROUND) : 0;
  const last = virtual ? Math.min(total, Math.ceil((top + height) / ROW) + AROUND) : Math.min(most, rows.length);
  const scrolled = () => {
    const now = box.current?.scrollTop ?? 0;
    setTop(now);
    reach(Math.min(total, Math.ceil((now + height) / ROW) + AHEAD));
  };
  const width = heads.length + Number(chosen !== null) + 1;
  const shown = Array.from({ length: Math.max(0, last - first) }, (_, i) => rows[first + i]);
  return (
    <>
      <div class={virtual ? "table long" : "table"} ref={box} onScroll={virtual ? scrolled : undefined} tabIndex={virtual ? 0 : undefined} aria-label="trials">
        <table class="rows" aria-rowcount={total + 1}>
          <thead>
            <tr>
              {chosen !== null && <th aria-label="selected" />}
              {heads.map((head) => (
                <Head key={head.key} head={head} sort={sort} setSort={setSort} />
              ))}
              <th aria-label="actions" />
            </tr>
          </thead>
          <tbody>
            {first > 0 && (
              <tr aria-hidden="true" style={{ height: `${first * ROW}px` }}>
                <td colSpan={width} />
              </tr>
            )}
            {shown.map((trial, i) =>
              trial ? (
                <Line key={trial.id} index={first + i} row={row} trial={trial} heads={heads} measured={measured(trial.id)} place={at.get(trial.id) ?? 0} chosen={chosen && chosen.includes(trial.id)} toggle={toggle} />
              ) : (
                <tr key={`reading ${first + i}`}>
                  <td colSpan={width} class="muted">
                    Loading…
                  </td>
                </tr>
              ),
            )}
            {virtual && last < total && (
              <tr aria-hidden="true" style={{ height: `${(total - last) * ROW}px` }}>
                <td colSpan={width} />
              </tr>
            )}
          </tbody>
        </table>
      </div>
      {!virtual && total > last && (
        <p>
          <button type="button" onClick={() => (setMost(most + ALL_ROWS), reach(most + ALL_ROWS))}>
            show more ({number(total)} trials)
          </button>
        </p>
      )}
    </>
  );
}

function Head({ head, sort, setSort }: { head: Column; sort: string; setSort: (sort: string) => void }) {
  if (!head.sorts) return <th>{head.name}</th>;
  const now = sort.replace(/^-/, "") === head.key;
  const falling = sort.startsWith("-");
  const click = () => setSort(`${(now ? !falling : head.falling) ? "-" : ""}${head.key}`);
  return (
    <th class={head.key.startsWith(PREFIX) ? "verbatim" : undefined} aria-sort={!now ? "none" : falling ? "descending" : "ascending"}>
      <button type="button" title={head.whole === head.name ? undefined : head.whole} onClick={click}>
        {head.name}
      </button>
    </th>
  );
}

interface LineProps {
  index: number;
  row: Experiment;
  trial: Trial;
  heads: Column[];
  measured: Record<string, Num>;
  place: number;
  chosen: boolean | null;
  toggle: (id: number) => void;
}

function Line({ index, row, trial, heads, measured, place, chosen, toggle }: LineProps) {
  const about = { row, place, measured, hparams: seenTrial(trial).hparams };
  return (
    <tr class={trial.id === row.best_trial_id ? "best" : ""} aria-rowindex={index + 2}>
      {chosen !== null && (
        <Cell>
          <input type="checkbox" checked={chosen} aria-label={`trial ${trial.id}`} onChange={() => toggle(trial.id)} />
        </Cell>
      )}
      {heads.map(({ key, name, kind, cell }) => (
        <Cell key={key} name={key === "state" ? undefined : name} kind={kind}>
          {cell(trial, about)}
        </Cell>
      ))}
      <Cell kind="acts">
        <a href={trialAddress(trial.id, "logs")}>logs</a>{" "}
        {trial.latest_checkpoint && (
          <Fork trial={trial.id} />
        )}
      </Cell>
    </tr>
  );
}
