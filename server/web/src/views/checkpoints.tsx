/** The checkpoints of an experiment or of a trial, the newest first, with what lies in each. */

import { Allowed } from "./users/access";
import { all, get, remove } from "../api";
import { Ask } from "../dialog";
import type { BestCheckpointAnswer, Checkpoint, Num, Trial, TrialPage } from "../resources";
import { modelAddress, trialAddress, useChoice } from "../route";
import { bytes, number } from "../format";
import { useLoaded } from "../live";
import { Badge, Cell, Copy, OneLine, Problem, Table, Time } from "../parts";
import { Register, type Registered } from "./registry/register";

const MOST_ROWS = 500;

interface CheckpointsProps {
  /** Whose: of an experiment, or of a trial. */
  path: string;
  experiment: number;
  tick: number;
  /** Trials; none stands for all. */
  chosen: number[];
  registry: Registered;
}

export function Checkpoints({ path, experiment, tick, chosen, registry }: CheckpointsProps) {
  const [shown, setShown] = useChoice("deleted");
  const deleted = shown !== "";
  const list = useLoaded(path, () => all<Checkpoint>(`${path}/checkpoints`, "checkpoints"), tick);
  const owners = useOwners(`/experiments/${experiment}`, list.value, tick);
  if (list.value === null) return list.error ? <Problem text={list.error} /> : <p class="muted">Loading…</p>;
  const mine = list.value.filter((c) => chosen.length === 0 || chosen.includes(c.trial_id));
  const kept = mine.filter((c) => c.state !== "DELETED");
  const rows = (deleted ? mine : kept).reverse();
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
        {rows.length > MOST_ROWS && <span class="muted">Showing the newest {MOST_ROWS}</span>}
      </div>
      {rows.length === 0 ? (
        <p class="muted">{mine.length === 0 ? "No checkpoints yet." : "All checkpoints were deleted."}</p>
      ) : (
        <Table
          head={["checkpoint", "trial", "batch", "size", "validation", "saved", ""].map((name) => (
            <th key={name} aria-label={name || "actions"}>
              {name}
            </th>
          ))}
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
  const files = Object.entries(c.resources).sort(([a], [b]) => a.localeCompare(b));
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
          </ul>
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

/** The validation metrics of a checkpoint, without the lengths that searchers count in. */
export function Measured({ metrics }: { metrics: Record<string, Num> | null }) {
  const found = Object.entries(metrics ?? {}).filter(([name]) => name !== "batches" && name !== "epochs");
  if (found.length === 0) return <>–</>;
  return (
    <>
      {found.map(([name, value]) => (
        <span key={name}>
          <i>{name}</i> {number(value)}
        </span>
      ))}
    </>
  );
}
