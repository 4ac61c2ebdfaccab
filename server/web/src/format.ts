/** Numbers, times and sizes as people read them. */

import type { Num } from "./resources";

export function number(value: Num | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value === "NaN" ? value : value.replace("Infinity", "∞");
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e-3 && size < 1e5 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

/** For axes: short, without zeros at the end. */
export function tick(value: number | null): string {
  if (value === null) return "";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential().replace(/(\.\d{2})\d+/, "$1");
  return Number(value.toPrecision(6)).toLocaleString("en", { maximumFractionDigits: 6 });
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

/** Local date and time. */
export function clock(time: string | null): string {
  return time === null ? "–" : new Date(time).toLocaleString("sv").slice(0, 19);
}

/** Time since a moment, in one unit; days for more than two. */
export function ago(time: string): string {
  const passed = Math.max(0, (Date.now() - Date.parse(time)) / 1000);
  if (passed < 60) return "just now";
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  if (passed < 86_400) return `${Math.floor(passed / 3600)} h ago`;
  const days = Math.floor(passed / 86_400);
  return days < 30 ? `${days} ${days === 1 ? "day" : "days"} ago` : clock(time).slice(0, 10);
}

export function duration(from: string | null, to: string | null): string {
  if (from === null) return "–";
  return seconds(((to === null ? Date.now() : Date.parse(to)) - Date.parse(from)) / 1000);
}

/** A span of time in two units. */
export function seconds(span: number): string {
  const whole = Math.max(0, Math.round(span));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600).toLocaleString("en")} h ${Math.floor((whole % 3600) / 60)} min`;
}
