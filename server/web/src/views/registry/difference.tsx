/** Two versions of a model beside each other: hyperparameters and metrics that differ. */

import { get } from "../../api";
import { leavesOf } from "../../columns";
import { number } from "../../format";
import { useLoaded } from "../../live";
import { Cell, Problem, Table } from "../../parts";
import type { ModelVersion, Num, Trial } from "../../resources";

type Leaf = Num | boolean | null;

export function Difference({ versions }: { versions: ModelVersion[] }) {
  const key = versions.map(({ trial_id }) => trial_id).join(",");
  const load = () => Promise.all(versions.map(({ trial_id }) => get<{ trial: Trial }>(`/trials/${trial_id}`).then(({ trial }) => trial)));
  const trials = useLoaded(`trials ${key}`, load);
  if (trials.value === null) return trials.error ? <Problem text={trials.error} /> : <p class="muted">Loading…</p>;
  const sides = trials.value.map((trial, at): Record<string, Leaf> => ({
    batch: versions[at]!.steps_completed,
    ...prefixed("metric", versions[at]!.metrics ?? {}),
    ...prefixed("hyperparameter", leavesOf(trial.hparams) as Record<string, Leaf>),
  }));
  const names = [...new Set(sides.flatMap((side) => Object.keys(side)))].filter((name) => sides.some((side) => side[name] !== sides[0]![name]));
  return (
    <section aria-label="difference of versions">
      <h2>Difference</h2>
      {names.length === 0 ? (
        <p class="muted">Hyperparameters and metrics are identical.</p>
      ) : (
        <Table head={["", ...versions.map(({ version }) => `version ${version}`)].map((head) => <th key={head} aria-label={head || "name"}>{head}</th>)}>
          {names.map((name) => (
            <tr key={name}>
              <Cell kind="name">{name}</Cell>
              {sides.map((side, at) => (
                <Cell key={at} name={`version ${versions[at]!.version}`} kind="figure">
                  {formatLeaf(side[name])}
                </Cell>
              ))}
            </tr>
          ))}
        </Table>
      )}
    </section>
  );
}

const prefixed = (prefix: string, values: Record<string, Leaf>): Record<string, Leaf> =>
  Object.fromEntries(Object.entries(values).map(([name, value]) => [`${prefix} ${name}`, value]));

const formatLeaf = (value: Leaf | undefined): string => (value === undefined ? "not set" : typeof value === "number" ? number(value) : String(value));
