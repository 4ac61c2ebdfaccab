/** What the lower axis of curves counts: batches, time since a trial's first report, or the clock. */

import { clock, number, seconds } from "../format";
import type { Curve as Series } from "../resources";

export type Along = "batch" | "time" | "clock";

export const ALONG: [string, string][] = [
  ["batch", "X axis: batch"],
  ["time", "X axis: time since first report"],
  ["clock", "X axis: wall-clock time"],
];

/** A series whose points stand at times, with the batch of each. */
export type Timed = Series & { steps?: number[] };

/** A place on the lower axis in words. */
export function formatPosition(place: number, along: Along): string {
  if (along === "batch") return `batch ${number(place)}`;
  return along === "clock" ? clock(new Date(place).toISOString()) : `after ${seconds(place / 1000)}`;
}

/** A tick of an axis of milliseconds. */
export function across(ms: number): string {
  const size = Math.abs(ms) / 1000;
  if (size < 1) return ms === 0 ? "0" : `${Number((ms / 1000).toFixed(3))} s`;
  if (size < 120) return `${Number((ms / 1000).toFixed(1))} s`;
  return size < 7200 ? `${Number((ms / 60_000).toFixed(1))} min` : `${Number((ms / 3_600_000).toFixed(1))} h`;
}

/** Put points at their times in milliseconds, of all series of one trial. */
export function timed(series: Series[], along: Along): Timed[] {
  if (along === "batch") return series;
  const first = Math.min(...series.flatMap((one) => one.time_s?.slice(0, 1) ?? []));
  return series.map((one) => {
    let last = -Infinity;
    const times = one.points.map((_, at) => {
      // Two that came together stand side by side; a clock that was set back does not turn a curve.
      const raw = 1000 * ((one.time_s?.[at] ?? first) - (along === "time" ? first : 0));
      last = Math.max(raw, last + 0.001);
      return last;
    });
    return {
      ...one,
      steps: one.points.map(([step]) => step),
      points: one.points.map(([, value], at) => [times[at]!, value]),
      band: one.band?.map(([, low, high, mean], at) => [times[at]!, low, high, mean]) ?? null,
    };
  });
}
