/** The curves of an experiment: of the trials that were chosen, or of the best. */

import { useMemo } from "preact/hooks";

import { Board } from "../chart/board";
import { difference, drawn, type Line, MOST_TRIALS } from "../chart/drawn";
import { distinct, look } from "../chart/looks";
import { type Seen, varying } from "../columns";
import { number } from "../format";
import { ENDED } from "../parts";
import type { Experiment } from "../resources";
import { address } from "../route";

interface CurvesProps {
  row: Experiment;
  trials: Seen[];
  /** The place of each trial among all. */
  at: Map<number, number>;
  chosen: Seen[];
  tick: number;
}

export function Curves({ row, trials, at, chosen, tick }: CurvesProps) {
  const some = useMemo(() => drawn(row, trials, chosen), [row, trials, chosen.map((t) => t.id).join()]);
  const lines = useMemo(
    () => {
      const names = varying(some.length > 1 ? some : trials); // what differs between the trials in the chart
      const looks = distinct(some.map((trial) => look(at.get(trial.id) ?? 0)));
      return some.map((trial, index): Line => ({
        trial,
        name: `trial ${trial.id}${trial.state === "ERROR" ? " (failed)" : ""}`,
        detail: difference(trial, names),
        look: looks[index]!,
        best: trial.id === row.best_trial_id,
        href: address(row.id, "curves", [trial.id]),
      }));
    },
    [some, trials, at, row.best_trial_id],
  );
  return (
    <Board
      lines={lines}
      several={trials.length > 1}
      metrics={row.metric ? [row.metric] : []}
      ended={ENDED.includes(row.state)}
      tick={tick}
      note={<LeftOut row={row} trials={trials} chosen={chosen} some={some} />}
    />
  );
}

/** Which trials are not drawn. */
function LeftOut({ row, trials, chosen, some }: { row: Experiment; trials: Seen[]; chosen: Seen[]; some: Seen[] }) {
  if (chosen.length > some.length) {
    return (
      <span class="warn">
        Showing the best {some.length} of {chosen.length} selected trials (maximum per chart: {MOST_TRIALS})
      </span>
    );
  }
  if (chosen.length > 0 || trials.length <= some.length) return null;
  return (
    <span class="muted">
      Showing the best {some.length} of {number(trials.length)} trials; <a href={address(row.id, "trials")}>select trials</a>
    </span>
  );
}
