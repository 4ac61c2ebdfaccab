/** Numbers, times and sizes as people read them. */

import { finite, type Num } from "./api";

export function number(value: Num | null | undefined): string {
  if (value === null || value === undefined) return "–";
  const known = finite(value);
  if (known === null) return String(value);
  if (Number.isInteger(known) && Math.abs(known) < 1e9) return known.toLocaleString("en");
  const size = Math.abs(known);
  return size >= 1e-3 && size < 1e5 ? known.toPrecision(4) : known.toExponential(2);
}

export function bytes(count: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? count : count.toFixed(1)} ${units[unit]}`;
}

export function clock(time: string | null): string {
  return time === null ? "–" : new Date(time).toLocaleString("sv").slice(0, 19);
}

export function duration(from: string | null, to: string | null): string {
  if (from === null) return "–";
  const seconds = Math.max(0, (to === null ? Date.now() : Date.parse(to)) - Date.parse(from)) / 1000;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

export function hparams(tree: Record<string, unknown>, prefix = ""): [string, string][] {
  return Object.entries(tree).flatMap(([key, value]): [string, string][] =>
    value !== null && typeof value === "object" && !Array.isArray(value)
      ? hparams(value as Record<string, unknown>, `${prefix}${key}.`)
      : [[prefix + key, typeof value === "number" ? number(value) : String(value)]],
  );
}
