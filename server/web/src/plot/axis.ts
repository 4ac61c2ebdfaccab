/** Axes of a drawing: where the value of a column lies, from 0 to 1. */

import type { Value } from "../columns";
import { number, tick } from "../format";
import { linear, linearTicks, logarithmic, logTicks } from "../chart/scales";

export interface Tick {
  at: number;
  label: string;
}

export interface Axis {
  column: string;
  title: string;
  kind: "linear" | "log" | "category";
  ticks: Tick[];
  /** Whether some have no value here: they lie below it. */
  gaps: boolean;
  /** From 0 to 1; null for what has no place. */
  place: (value: Value) => number | null;
  /** What lies at a place. */
  value: (place: number) => Value;
  /** Values of a category, from 0 to 1. */
  values: Value[];
}

const MANY = 100;
const MOST_LABELS = 24;

/** Whether values span so many orders of magnitude that a logarithmic axis is better. */
export function wide(cells: Value[]): boolean {
  const numbers = cells.filter((value): value is number => typeof value === "number");
  const least = numbers.reduce((a, b) => Math.min(a, b), Infinity);
  return least > 0 && numbers.reduce((a, b) => Math.max(a, b), 0) / least >= MANY;
}

/** Make the axis of some values; one of numbers is logarithmic if it can and shall be. */
export function makeAxis(column: string, title: string, cells: Value[], log = false, wanted = 6): Axis {
  const there = cells.filter((value) => value !== null);
  const base = { column, title, gaps: there.length < cells.length };
  if (there.length > 0 && there.every((value) => typeof value === "number")) return { ...base, ...ofNumbers(there as number[], log, wanted) };
  return { ...base, ...ofCategories(there) };
}

type Made = Pick<Axis, "kind" | "ticks" | "place" | "value" | "values">;

function ofNumbers(there: number[], wish: boolean, wanted: number): Made {
  const least = there.reduce((a, b) => Math.min(a, b), Infinity);
  const most = there.reduce((a, b) => Math.max(a, b), -Infinity);
  const log = wish && least > 0;
  const [min, max] = log ? logarithmic(least, most) : linear(least, most);
  const [low, high] = log ? [Math.log(min), Math.log(max)] : [min, max];
  const place = (value: Value) => (typeof value === "number" && !(log && value <= 0) ? ((log ? Math.log(value) : value) - low) / (high - low) : null);
  const value = (at: number) => {
    const found = low + at * (high - low);
    return Number((log ? Math.exp(found) : found).toPrecision(4));
  };
  const marks = log ? logTicks([min, max], wanted) : linearTicks([min, max], wanted);
  return { kind: log ? "log" : "linear", place, value, values: [], ticks: marks.map((each) => ({ at: place(each)!, label: tick(each) })) };
}

function ofCategories(there: Value[]): Made {
  const values = [...new Set(there)].sort((a, b) => String(a).localeCompare(String(b), "en", { numeric: true }));
  const places = new Map(values.map((value, at) => [value, (at + 0.5) / values.length]));
  const every = Math.ceil(values.length / MOST_LABELS);
  const ticks = values.map((value, at) => ({ at: places.get(value)!, label: at % every === 0 ? written(value) : "" }));
  const value = (at: number) => values[Math.min(values.length - 1, Math.max(0, Math.floor(at * values.length)))] ?? null;
  return { kind: "category", values, ticks, value, place: (each) => places.get(each) ?? null };
}

/** A value in few characters. */
export function written(value: Value): string {
  if (value === null) return "–";
  const text = typeof value === "number" ? number(value) : String(value);
  return text.length > 18 ? `${text.slice(0, 17)}…` : text;
}
