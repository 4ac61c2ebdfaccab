/** Experiments of the list by a value: their number, and the best result of each group. */

import { leavesOf } from "../../columns";
import { number } from "../../format";

import { Cell, ENDED, Table } from "../../parts";
import type { Experiment } from "../../resources";
import { address } from "../../route";
import { measured } from "../../sorting";

interface GroupsProps {
  rows: Experiment[];
  /** user, project, label, state, or a key of the configuration. */
  by: string;
}

const NONE = "–";

function valuesOf(e: Experiment, by: string): string[] {
  if (by === "user") return [e.owner ?? NONE];
  if (by === "project") return [e.project ?? "default"];
  if (by === "state") return [e.state];
  if (by === "label") return e.labels.length > 0 ? e.labels : [NONE];
  const leaves = leavesOf(e.config);
  const value = leaves[by] ?? leaves[`${by}.val`];
  return [value === undefined || value === null ? NONE : String(value)];
}

/** The best result of the metric that most have. */
function bestOf(rows: Experiment[]): Experiment | null {
  const done = rows.filter((e) => e.metric !== null && measured(e.best_validation) !== null);
  const counts = new Map<string, number>();
  for (const e of done) counts.set(e.metric!, (counts.get(e.metric!) ?? 0) + 1);
  const metric = [...counts].sort((a, b) => b[1] - a[1])[0]?.[0];
  const same = done.filter((e) => e.metric === metric);
  const value = (e: Experiment) => (e.smaller_is_better ? 1 : -1) * measured(e.best_validation)!;
  return same.sort((a, b) => value(a) - value(b))[0] ?? null;
}

export function Groups({ rows, by }: GroupsProps) {
  const groups = new Map<string, Experiment[]>();
  for (const e of rows) {
    for (const value of valuesOf(e, by)) groups.set(value, [...(groups.get(value) ?? []), e]);
  }
  const sorted = [...groups].sort((a, b) => b[1].length - a[1].length || a[0].localeCompare(b[0]));
  return (
    <Table head={[by.replace(/^hyperparameters\./, ""), "experiments", "unfinished", "failed", "best", "experiment"].map((name) => <th key={name}>{name}</th>)}>
      {sorted.map(([value, members]) => {
        const best = bestOf(members);
        return (
          <tr key={value}>
            <Cell kind="name">{value}</Cell>
            <Cell name="experiments" kind="figure">
              {number(members.length)}
            </Cell>
            <Cell name="unfinished" kind="figure">
              {number(members.filter((e) => !ENDED.includes(e.state)).length)}
            </Cell>
            <Cell name="failed" kind="figure">
              {number(members.filter((e) => e.state === "ERROR").length)}
            </Cell>
            <Cell name="best" kind="figure">
              {best === null ? NONE : number(best.best_validation)} <small class="muted">{best?.metric}</small>
            </Cell>
            <Cell name="experiment">{best && <a href={address(best.id)}>{`${best.id} ${best.name}`}</a>}</Cell>
          </tr>
        );
      })}
    </Table>
  );
}
