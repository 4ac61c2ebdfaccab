/** What an axis of values shows, and where it has ticks. */

import uPlot from "uplot";

export type Range = [number, number];

/** A linear axis: around a flat curve a little, not uPlot's 0 to 100. */
export function linear(min: number | null, max: number | null): Range {
  if (min === null || max === null) return [0, 1];
  if (min !== max) return uPlot.rangeNum(min, max, 0.1, true) as Range;
  const room = Math.abs(min) / 2 || 1;
  return [min - room, max + room];
}

/** A logarithmic axis: what there is and a twentieth around it, not whole decades. */
export function logarithmic(min: number | null, max: number | null): Range {
  if (min === null || max === null || min <= 0) return [0.1, 1];
  const room = min === max ? 2 : (max / min) ** 0.05;
  return [min / room, max * room];
}

/** Most of the values of some columns that are in sight: without the outer fiftieth on each side. */
export function withoutOutliers(plot: uPlot, columns: number[]): [number | null, number | null] {
  const [first, last] = plot.series[0]!.idxs ?? [0, -1];
  const seen = columns.flatMap((column) => [...plot.data[column]!].slice(first, last + 1));
  const values = seen.filter((value) => value != null).sort((a, b) => a - b);
  const edge = Math.floor(values.length / 50);
  return [values[edge] ?? null, values[values.length - 1 - edge] ?? null];
}

const MANTISSAS = [[1], [1, 3], [1, 2, 5], [1, 2, 3, 4, 5, 6, 8]];

/** Ticks of a logarithmic axis: round numbers, about `wanted` of them. */
export function logTicks([min, max]: Range, wanted: number): number[] {
  const [first, last] = [Math.floor(Math.log10(min)), Math.ceil(Math.log10(max))];
  const every = Math.max(1, Math.ceil((last - first) / Math.max(1, wanted)));
  let found: number[] = [];
  for (const mantissas of MANTISSAS) {
    const all: number[] = [];
    for (let decade = first; decade <= last; decade += every) {
      for (const each of mantissas) all.push(Number(`${each}e${decade}`));
    }
    const inside = all.filter((tick) => tick >= min && tick <= max);
    if (inside.length > wanted && found.length > 1) break;
    found = inside;
  }
  return found.length > 2 ? found : linearTicks([min, max], wanted);
}

/** Round numbers at equal distances: what a logarithmic axis shows of less than half a decade. */
export function linearTicks([min, max]: Range, wanted: number): number[] {
  const rough = (max - min) / Math.max(1, wanted);
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * size).find((each) => each >= rough)!;
  const found: number[] = [];
  for (let tick = Math.ceil(min / step); tick * step <= max; tick += 1) found.push(Number((tick * step).toPrecision(12)));
  return found;
}
