/** A metric of a trial as a curve: long ones are means with a band; a part of one in detail. */

import uPlot from "uplot";

import { finite } from "../api";
import type { Num, Curve as Series } from "../resources";
import type { Look } from "./looks";

export interface Curve {
  trial: number;
  /** Who it is, in words: the trial and what it was started with. */
  label: string;
  look: Look;
  series: Series;
}

/** First and last batch that are seen. */
export type Zoom = [number, number];

type Band = [number, Num, Num, Num];

export const banded = (series: Series): boolean => Boolean(series.band?.length);

/** Put what was read of a part in the place that it has in the whole. */
export function refine(whole: Series[], details: Series[], [first, last]: Zoom): Series[] {
  const outside = (row: [number, ...unknown[]]) => row[0] < first || row[0] > last;
  const step = (a: [number, ...unknown[]], b: [number, ...unknown[]]) => a[0] - b[0];
  return whole.map((series) => {
    const detail = details.find((one) => one.group === series.group && one.name === series.name);
    const points = [...series.points.filter(outside), ...(detail?.points ?? [])].sort(step);
    if (!banded(series)) return { ...series, points };
    const rows = detail?.band ?? detail?.points.map(([at, value]): Band => [at, value, value, value]) ?? [];
    return { ...series, points, band: [...series.band!.filter(outside), ...rows].sort(step) };
  });
}

/** A logarithmic axis shows bands down to this part of the least value above zero. */
const UNDER = 0.1;

export interface Drawing {
  data: uPlot.AlignedData;
  /** The column in `data` of each curve; of a band, its mean. */
  columns: number[];
  /** Values that have no place in any drawing: NaN and infinities. */
  lost: number;
  /** Where each curve that has such values is first not finite, from left to right. */
  broken: Broken[];
  /** Whether there is nothing to draw. */
  empty: boolean;
  /** Points at or below zero that a logarithmic axis has no place for. */
  below: number;
  /** Whether bands reach below what a logarithmic axis shows. */
  cut: boolean;
  /** Whether the axis is logarithmic: it was asked for, and something is above zero. */
  log: boolean;
}

export interface Broken {
  at: number;
  color: string;
  /** Whether no finite value follows. */
  stays: boolean;
}

/** Where curves are first not finite, from left to right. */
function broken(curves: Curve[]): Broken[] {
  const found = curves.flatMap(({ look, series: { points } }): Broken[] => {
    const first = points.findIndex((point) => finite(point[1]) === null);
    if (first < 0) return [];
    return [{ at: points[first]![0], color: look.color, stays: points.slice(first).every((point) => finite(point[1]) === null) }];
  });
  return found.sort((a, b) => a.at - b.at);
}

/** How lines are drawn. */
export interface Style {
  log: boolean;
  /** Weight of what came before in a running mean, from 0 to 1; bands stay as they are. */
  smooth: number;
}

/** The running mean, without the pull of a beginning; what is not finite is passed over. */
function smoothed(values: (number | null)[], weight: number): (number | null)[] {
  let [mean, mass] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

/** Merge curves onto one axis of steps; lines continue across gaps, and stop at zero. */
export function draw(curves: Curve[], { log, smooth }: Style): Drawing {
  const values = log ? curves.flatMap(({ series }) => series.points.map((point) => point[1])) : [];
  const least = values.reduce<number>((low, value) => (typeof value === "number" && value > 0 && value < low ? value : low), Infinity);
  const drawn = log && least < Infinity;
  const floor = least * UNDER;
  const columns: number[] = [];
  let width = 1;
  const tables = curves.flatMap(({ series }): uPlot.AlignedData[] => {
    const column = (rows: Num[][], index: number, edge: boolean): uPlot.AlignedData => {
      const raw = rows.map((row) => finite(row[index]));
      const line = edge || smooth === 0 ? raw : smoothed(raw, smooth);
      return [rows.map((row) => row[0] as number), line.map((value) => place(value, drawn, edge ? floor : null))];
    };
    columns.push(width);
    width += banded(series) ? 3 : 1;
    if (!banded(series)) return [column(series.points, 1, false)];
    const band = series.band!;
    return [column(band, 3, false), column(band, 2, true), column(band, 1, true)];
  });
  const lost = sum(curves, ({ series }) => series.points.filter((point) => finite(point[1]) === null).length);
  return {
    data: tables.length === 0 ? [[]] : uPlot.join(tables),
    columns,
    lost,
    broken: broken(curves),
    empty: lost === sum(curves, ({ series }) => series.points.length),
    below: values.filter((value) => (finite(value) ?? 1) <= 0).length,
    cut: drawn && curves.some(({ series }) => series.band?.some((row) => (finite(row[1]) ?? floor) < floor)),
    log: drawn,
  };
}

/** Where a value is drawn; the edge of a band lies on the floor of a logarithmic axis, or above. */
function place(value: number | null, log: boolean, floor: number | null): number | null | undefined {
  if (value === null) return undefined; // uPlot breaks a line at null
  if (!log) return value;
  return floor === null ? (value > 0 ? value : null) : Math.max(value, floor);
}

function sum<T>(rows: T[], count: (row: T) => number): number {
  return rows.reduce((total, row) => total + count(row), 0);
}

/** First and last step of all curves. */
export function extent(curves: Curve[]): Zoom {
  let [first, last] = [Infinity, -Infinity];
  for (const { series } of curves) {
    first = Math.min(first, series.points[0]?.[0] ?? Infinity);
    last = Math.max(last, series.points[series.points.length - 1]?.[0] ?? -Infinity);
  }
  if (first > last) return [0, 1];
  return first === last ? [first - 1, last + 1] : [first, last];
}
