/** Metrics that were reported once: their values, in place of charts with one dot. */

import { number } from "../format";
import { Cell, Table } from "../parts";
import { type Along, formatPosition } from "./along";
import type { Line, Titled } from "./drawn";

/** Whether a metric has no more than one point in any trial. */
export const single = ([, curves]: Titled): boolean => curves.every(({ series }) => series.points.length <= 1);

interface ValuesProps {
  found: Titled[];
  lines: Line[];
  /** Whether each trial has a row; else each metric. */
  several: boolean;
  along: Along;
}

export function Values({ found, lines, several, along }: ValuesProps) {
  if (found.length === 0) return null;
  const titles = found.map(([title]) => title);
  return (
    <section class="values" aria-label="metrics that were reported once">
      <Table head={(several ? ["trial", ...titles] : ["reported once", "value", "at"]).map((name) => <th key={name}>{name}</th>)}>
        {several ? lines.map((line) => <OfTrial key={line.trial.id} line={line} found={found} along={along} />) : found.map((titled) => <OfMetric key={titled[0]} titled={titled} along={along} />)}
      </Table>
    </section>
  );
}

function OfTrial({ line, found, along }: { line: Line; found: Titled[]; along: Along }) {
  return (
    <tr class={line.best ? "best" : ""}>
      <Cell kind="name">
        <i class="swatch" style={{ background: line.look.color }} /> <a href={line.href}>{line.name}</a> <small class="muted">{line.detail}</small>
      </Cell>
      {found.map(([title, curves]) => {
        const point = curves.find(({ trial }) => trial === line.trial.id)?.series.points[0];
        return (
          <Cell key={title} name={title} kind="figure">
            {number(point?.[1])} {point && <small class="muted">{formatPosition(point[0], along)}</small>}
          </Cell>
        );
      })}
    </tr>
  );
}

function OfMetric({ titled: [title, curves], along }: { titled: Titled; along: Along }) {
  const point = curves[0]?.series.points[0];
  return (
    <tr>
      <Cell kind="name">{title}</Cell>
      <Cell name="value" kind="figure">
        {number(point?.[1])}
      </Cell>
      <Cell name="at" kind="figure">
        {point && formatPosition(point[0], along)}
      </Cell>
    </tr>
  );
}
