/** The checkpoints of an experiment or of a trial, the newest first, with what lies in each. */

import { Allowed } from "./users/access";
import { all, finite, get, remove } from "../api";
import { Ask } from "../dialog";
import type { BestCheckpointAnswer, Checkpoint, Num, Trial, TrialPage } from "../resources";
import { modelAddress, trialAddress, useChoice } from "../route";
import { bytes, number } from "../format";
import { useLoaded } from "../live";
import { Badge, Cell, Copy, OneLine, Problem, Select, Table, Time } from "../parts";
import { type Column, Heads, sorted, useOrder } from "../sorting";
import { Register, type Registered } from "./registry/register";

const MOST_ROWS = 500;

/** A checkpoint with its place in the listing. */
interface Numbered extends Checkpoint {
  id: number;
}

const VALIDATION = "validation";

const COLUMNS: Column<Numbered>[] = [
  { name: "trial", value: (c) => c.trial_id },
  { name: "batch", value: (c) => c.steps_completed, falling: true },
  { name: "size", value: (c) => c.size_bytes, falling: true },
  { name: "saved", value: (c) => c.id, falling: true },
];

const BOUND = /^\s*(<=?|>=?|≤|≥)?\s*(-?[\d.]+(?:e[-+]?\d+)?)\s*$/i;

/** Whether a value keeps to a limit such as `< 0.5`; a limit that cannot be read holds for all. */
function within(value: number | null, bound: string): boolean {
  const [, sign = "<=", text] = BOUND.exec(bound) ?? [];
  if (text === undefined || !Number.isFinite(Number(text))) return true;
  if (value === null) return false;
  const limit = Number(text);
  const holds: Record<string, boolean> = { "<": value < limit, ">": value > limit, ">=": value >= limit, "≥": value >= limit };
  return holds[sign] ?? value <= limit;
}

interface CheckpointsProps {
  /** Whose: of an experiment, or of a trial. */
  path: string;
  experiment: number;
  tick: number;
  /** Trials; none means all. */
  chosen: number[];
  registry: Registered;
}

export function Checkpoints({ path, experiment, tick, chosen, registry }: CheckpointsProps) {
  const [shown, setShown] = useChoice("deleted");
  const deleted = shown !== "";
  const [state, setState] = useChoice("saved_state");
  const [best, setBest] = useChoice("best");
  const [metric, setMetric] = useChoice("saved_metric");
  const [bound, setBound] = useChoice("bound");
  const [order, sort] = useOrder(COLUMNS, { name: "saved", falling: true }, "saved_sort");
  const list = useLoaded(path, () => all<Checkpoint>(`${path}/checkpoints`, "checkpoints"), tick);
  const owners = useOwners(`/experiments/${experiment}`, list.value, tick);
  if (list.value === null) return list.error ? <Problem text={list.error} /> : <p class="muted">Loading…</p>;
  const mine = list.value.filter((c) => chosen.length === 0 || chosen.includes(c.trial_id));
  const kept = mine.filter((c) => c.state !== "DELETED");
  const present = deleted ? mine : kept;
  const states = [...new Set(present.map((c) => c.state))].sort();
  const names = [...new Set(present.flatMap((c) => measuredNames(c.metrics)))].sort();
  const by = names.includes(metric) ? metric : names.includes("loss") ? "loss" : (names[0] ?? "");
  const ordered = [...COLUMNS, { name: VALIDATION, value: (c: Numbered) => finite(c.metrics?.[by]) }];
  const rows = sorted(
    present.map((c, id): Numbered => ({ ...c, id })),
    ordered,
    order,
  )
    .filter((c) => state === "" || c.state === state)
    .filter((c) => best === "" || owners.get(c.trial_id)?.best_checkpoint === c.uuid)
    .filter((c) => within(finite(c.metrics?.[by]), bound));
  const size = kept.reduce((sum, c) => sum + c.size_bytes, 0);
  return (
    <section>
      <div class="choice">
        <span class="muted">
          {number(kept.length)} {kept.length === 1 ? "checkpoint" : "checkpoints"}, {bytes(size)}
        </span>
        {mine.length > kept.length && (
          <label>
            <input type="checkbox" checked={deleted} onChange={(e) => setShown(e.currentTarget.checked ? "1" : "")} /> Show deleted (
            {number(mine.length - kept.length)})
          </label>
        )}
        {(states.length > 1 || state !== "") && <Select name="state" value={state} options={[["", "All states"], ...states.map((one): [string, string] => [one, one.toLowerCase()])]} choose={setState} />}
        {(kept.length > 1 || best !== "") && (
          <label title="The best checkpoint of each trial">
            <input type="checkbox" checked={best !== ""} onChange={(e) => setBest(e.currentTarget.checked ? "1" : "")} /> Only best
          </label>
        )}
        {((kept.length > 1 && by !== "") || bound !== "") && (
          <span class="bulk">
            {names.length > 1 ? <Select name="metric" value={by} options={names.map((name): [string, string] => [name, name])} choose={setMetric} /> : by}
            <input aria-label={`limit of ${by}`} title="Such as < 0.5 or >= 0.9" placeholder="< 0.5" size={7} value={bound} onInput={(e) => setBound(e.currentTarget.value)} />
          </span>
        )}
        {rows.length > MOST_ROWS && <span class="muted">Showing the first {MOST_ROWS}</span>}
      </div>
      {rows.length === 0 ? (
        <p class="muted">{mine.length === 0 ? "No checkpoints yet." : kept.length === 0 && !deleted ? "All checkpoints were deleted." : "No matches."}</p>
      ) : (
        <Table
          head={
            <>
              <th>checkpoint</th>
              <Heads columns={[...ordered.filter(({ name }) => name !== "saved"), ...COLUMNS.filter(({ name }) => name === "saved")]} order={order} sort={sort} />
              <th aria-label="actions" />
            </>
          }
        >
          {rows.slice(0, MOST_ROWS).map((c) => (
            <Line key={c.uuid} checkpoint={c} trial={owners.get(c.trial_id)} registry={registry} done={list.reload} />
          ))}
        </Table>
      )}
    </section>
  );
}

/** The trials of the newest checkpoints. */
function useOwners(path: string, list: Checkpoint[] | null, tick: number): Map<number, Trial> {
  const ids = [...new Set((list ?? []).slice(-MOST_ROWS).map((c) => c.trial_id))];
  const where = encodeURIComponent(JSON.stringify([["id", "in", ids]]));
  const load = () => (ids.length === 0 ? Promise.resolve([]) : get<TrialPage>(`${path}/trials?limit=1000&where=${where}`).then((page) => page.trials));
  const found = useLoaded(`${path} ${ids.length}`, load, tick);
  return new Map((found.value ?? []).map((trial) => [trial.id, trial]));
}

interface LineProps {
  checkpoint: Checkpoint;
  trial: Trial | undefined;
  registry: Registered;
  /** Called after the checkpoint was deleted. */
  done: () => void;
}

function Line({ checkpoint: c, trial, registry, done }: LineProps) {
  return (
    <tr class={c.state === "DELETED" ? "gone" : ""}>
      <Cell>
        <details>
          <summary>
            <code title={c.uuid}>{c.uuid.slice(0, 8)}</code>
            {c.state !== "COMPLETED" && <Badge of={c} />}
            {trial?.best_checkpoint === c.uuid && <small class="label">best</small>}
            {trial?.latest_checkpoint === c.uuid && <small class="label">latest</small>}
            {registry.versionsOf(c.uuid).map(({ model, version }) => (
              <a class="label" key={model} href={modelAddress(model)}>
                {model} {version}
              </a>
            ))}
          </summary>
          <p class="path">
            {c.uuid} <Copy text={c.uuid} />
          </p>
          <p class="path">{c.path}</p>
          <p class="path">zerolab checkpoint download {c.uuid} DIRECTORY</p>
          <Files checkpoint={c} />
        </details>
      </Cell>
      <Cell name="trial" kind="figure">
        <a href={trialAddress(c.trial_id)}>{c.trial_id}</a>
      </Cell>
      <Cell name="batch" kind="figure">
        {number(c.steps_completed)}
      </Cell>
      <Cell name="size" kind="figure">
        {bytes(c.size_bytes)}
      </Cell>
      <Cell name="validation" kind="hparams">
        <Measured metrics={c.metrics} />
      </Cell>
      <Cell name="saved" kind="figure">
        <Time at={c.created_at} />
      </Cell>
      <Cell kind="acts">
        <Allowed>
          {c.state === "COMPLETED" && <Register checkpoint={c.uuid} registry={registry} />}{" "}
          {c.state !== "DELETED" && (
            <Ask
              act={() => remove(`/checkpoints/${c.uuid}`).then(done)}
              final
              title={`delete checkpoint ${c.uuid.slice(0, 8)}?`}
              ask="Its files are deleted. This cannot be undone."
            >
              delete
            </Ask>
          )}
        </Allowed>
      </Cell>
    </tr>
  );
}

/** The files of a checkpoint, to download. */
export function Files({ checkpoint: c }: { checkpoint: Checkpoint }) {
  const files = Object.entries(c.resources).sort(([a], [b]) => a.localeCompare(b));
  return (
    <ul class="files">
      {files.map(([name, size]) => (
        <li key={name}>
          {c.state === "DELETED" ? (
            name
          ) : (
            <a href={`/api/v1/checkpoints/${c.uuid}/file?name=${encodeURIComponent(name)}`} download={name.split("/").at(-1)}>
              {name}
            </a>
          )}{" "}
          <span class="muted">{bytes(size)}</span>
        </li>
      ))}
      {c.state !== "DELETED" && (
        <li>
          <a href={`/api/v1/checkpoints/${c.uuid}/archive`} download>
            all files (tar)
          </a>{" "}
          <span class="muted">{bytes(c.size_bytes)}</span>
        </li>
      )}
    </ul>
  );
}

/** The best checkpoint of an experiment or a trial: its own validation, and where it was saved. */
export function Saved({ path, tick }: { path: string; tick: number }) {
  const best = useLoaded(`${path}/best-checkpoint`, () => get<BestCheckpointAnswer>(`${path}/best-checkpoint`).then((answer) => answer.best_checkpoint), tick).value;
  if (best === null) return <>–</>;
  const { checkpoint: c, validation, note } = best;
  return (
    <>
      {c === null ? (
        "none"
      ) : (
        <>
          <code title={c.uuid}>{c.uuid.slice(0, 8)}</code> {number(validation)} <small class="muted">at batch {number(c.steps_completed)}</small>
          {path.startsWith("/experiments/") && (
            <>
              {" of "}
              <a href={trialAddress(c.trial_id, "checkpoints")}>trial {c.trial_id}</a>
            </>
          )}
        </>
      )}
      {note !== null && <OneLine text={note} kind="empty" />}
    </>
  );
}

/** Names of the validation metrics, without the lengths that searchers count in. */
const measuredNames = (metrics: Record<string, Num> | null): string[] => Object.keys(metrics ?? {}).filter((name) => name !== "batches" && name !== "epochs");

/** The validation metrics of a checkpoint. */
export function Measured({ metrics }: { metrics: Record<string, Num> | null }) {
  const found = measuredNames(metrics);
  if (found.length === 0) return <>–</>;
  return (
    <>
      {found.map((name) => (
        <span key={name}>
          <i>{name}</i> {number(metrics![name])}
        </span>
      ))}
    </>
  );
}
