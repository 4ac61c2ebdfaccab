/** What the x axis of curves counts: batches, time since a trial's first report, the clock, or a metric. */

import { finite } from "../api";
import { clock, number, seconds } from "../format";
import type { Curve as Series } from "../resources";

/** A metric is named as its chart is: `training: loss`. */
export type Along = "batch" | "time" | "clock" | `${string}: ${string}`;

export const ALONG: [string, string][] = [
  ["batch", "X axis: batch"],
  ["time", "X axis: time since first report"],
  ["clock", "X axis: wall-clock time"],
];

const EPOCHS = "training: epochs";

/** Most metrics that the list of x axes offers. */
const MOST_METRICS = 40;

/** A series whose points have another position than their batch, with the batch of each. */
export type Timed = Series & { steps?: number[] };

export const titleOf = ({ group, name }: Pick<Series, "group" | "name">): string => `${group}: ${name}`;

export const isMetric = (along: string): along is `${string}: ${string}` => along.includes(": ");

/** Whether the times of points are needed. */
export const isTime = (along: Along): boolean => along === "time" || along === "clock";

/** The choices for the x axis; `titles` are those of the metrics that were read. */
export function axesOf(titles: string[], along: Along): [string, string][] {
  const metrics = [...new Set([...(isMetric(along) ? [along] : []), ...titles])];
  const epochs = metrics.filter((title) => title === EPOCHS);
  const others = metrics.filter((title) => title !== EPOCHS).slice(0, MOST_METRICS);
  return [...ALONG, ...[...epochs, ...others].map((title): [string, string] => [title, `X axis: ${axisName(title as Along)}`])];
}

export function axisName(along: Along): string {
  if (along === "time") return "time since first report";
  if (along === "clock") return "wall-clock time";
  return along === EPOCHS ? "epoch" : along;
}

/** A position on the x axis in words. */
export function formatPosition(place: number, along: Along): string {
  if (along === "batch") return `batch ${number(place)}`;
  if (isMetric(along)) return `${axisName(along)} ${number(place)}`;
  return along === "clock" ? clock(new Date(place).toISOString()) : `after ${seconds(place / 1000)}`;
}

/** The ends of a zoom: whole batches and milliseconds, but any value of a metric. */
export function zoomTo(first: number, last: number, along: Along): [number, number] {
  if (isMetric(along)) return [Number(first.toPrecision(6)), Number(last.toPrecision(6))];
  const start = Math.max(0, Math.floor(first));
  return [start, Math.max(start + 1, Math.ceil(last))];
}

/** A tick of an axis of milliseconds. */
export function across(ms: number): string {
  const size = Math.abs(ms) / 1000;
  if (size < 1) return ms === 0 ? "0" : `${Number((ms / 1000).toFixed(3))} s`;
  if (size < 120) return `${Number((ms / 1000).toFixed(1))} s`;
  return size < 7200 ? `${Number((ms / 60_000).toFixed(1))} min` : `${Number((ms / 3_600_000).toFixed(1))} h`;
}

/** Move the points of all series of one trial to their positions on the x axis. */
export function positioned(series: Series[], along: Along): Timed[] {
  if (along === "batch") return series;
  if (isMetric(along)) return overMetric(series, along);
  const first = Math.min(...series.flatMap((one) => one.time_s?.slice(0, 1) ?? []));
  return series.map((one) => {
    let last = -Infinity;
    const times = one.points.map((_, at) => {
      // Two that came together stand side by side; a clock that was set back does not turn a curve.
      const raw = 1000 * ((one.time_s?.[at] ?? first) - (along === "time" ? first : 0));
      last = Math.max(raw, last + 0.001);
      return last;
    });
    return moved(one, times);
  });
}

function moved(one: Series, places: number[]): Timed {
  return {
    ...one,
    steps: one.points.map(([step]) => step),
    points: one.points.map(([, value], at) => [places[at]!, value]),
    band: one.band?.map(([, low, high, mean], at) => [places[at]!, low, high, mean]) ?? null,
  };
}

/** Put points at the value that a metric had at their batch, ordered by this value. */
function overMetric(series: Series[], along: Along): Timed[] {
  const axis = series.find((one) => titleOf(one) === along);
  const known = (axis?.points ?? []).filter((point): point is [number, number] => finite(point[1]) !== null);
  return series
    .filter((one) => one !== axis)
    .map((one) => {
      const rows = one.points
        .map(([step], at) => ({ at, place: valueAt(known, step) }))
        .filter((row): row is { at: number; place: number } => row.place !== null)
        .sort((a, b) => a.place - b.place);
      const places: number[] = [];
      for (const { place } of rows) {
        const before = places.at(-1); // points with the same value stand side by side
        places.push(before === undefined ? place : Math.max(place, before + 1e-9 * Math.abs(before) + 1e-12));
      }
      const pick = <T,>(values: T[]): T[] => rows.map(({ at }) => values[at]!);
      return moved({ ...one, points: pick(one.points), band: one.band ? pick(one.band) : null }, places);
    });
}

/** A metric's value at a batch, interpolated; null before its first and after its last point. */
function valueAt(points: [number, number][], step: number): number | null {
  let [low, high] = [0, points.length - 1];
  if (high < 0 || step < points[0]![0] || step > points[high]![0]) return null;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle]![0] <= step) low = middle;
    else high = middle;
  }
  const [[x0, y0], [x1, y1]] = [points[low]!, points[high]!];
  if (step === x1 || x0 === x1) return y1;
  return y0 + ((y1 - y0) * (step - x0)) / (x1 - x0);
}
