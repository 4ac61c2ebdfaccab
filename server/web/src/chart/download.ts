/** A chart as a file: a drawing (SVG or PNG) or a table of its points (CSV). */

import type uPlot from "uplot";

import { tick } from "../format";
import { save } from "../parts";
import { type Along, across, axisName } from "./along";
import { banded, type Curve, type Drawing } from "./curve";
import { linearTicks, logTicks, type Range } from "./scales";

export interface Shown {
  title: string;
  curves: Curve[];
  drawing: Drawing;
  along: Along;
  plot: uPlot;
}

export type Format = "PNG" | "SVG" | "CSV";

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [900, 420, 72, 20, 36, 52];
const LINE = 18;
const PNG_SCALE = 2;

export async function download(shown: Shown, format: Format): Promise<void> {
  const name = `${shown.title.replace(/[^\w.-]+/g, "-")}.${format.toLowerCase()}`;
  if (format === "CSV") return save(name, csv(shown));
  const text = svg(shown);
  save(name, format === "SVG" ? text : await png(text));
}

/** A row for each position, a column for each curve; of merged points also the minimum and maximum. */
function csv({ curves, along }: Shown): string {
  const columns = curves.flatMap(({ label, series }) => {
    const rows: [string, [number, unknown][]][] = [[label, series.points]];
    if (!banded(series)) return rows;
    const band = (at: 1 | 2): [number, unknown][] => series.band!.map((row) => [row[0], row[at]]);
    return [...rows, [`${label} minimum`, band(1)] as (typeof rows)[0], [`${label} maximum`, band(2)] as (typeof rows)[0]];
  });
  const known = columns.map(([, points]) => new Map(points));
  const places = [...new Set(columns.flatMap(([, points]) => points.map(([place]) => place)))].sort((a, b) => a - b);
  const unit = along === "time" ? " (seconds)" : "";
  const written = (place: number) => (along === "clock" ? new Date(place).toISOString() : String(along === "time" ? place / 1000 : place));
  const lines = places.map((place) => [written(place), ...known.map((values) => String(values.get(place) ?? ""))]);
  return [[axisName(along) + unit, ...columns.map(([label]) => label)], ...lines].map((row) => row.map(quoted).join(",")).join("\n") + "\n";
}

const quoted = (text: string): string => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

const escaped = (text: string): string => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");

/** The part that is in sight, on white, with a legend. */
function svg({ title, curves, drawing, along, plot }: Shown): string {
  const legend = curves.length > 1 ? curves : [];
  const height = HEIGHT + legend.length * LINE;
  const [x, y] = [scaleOf(plot, "x"), scaleOf(plot, "y")];
  const place = (value: number) => LEFT + ((value - x[0]) / (x[1] - x[0])) * (WIDTH - LEFT - RIGHT);
  const raise = drawing.log ? Math.log10 : (value: number) => value;
  const level = (value: number) => HEIGHT - BOTTOM - ((raise(value) - raise(y[0])) / (raise(y[1]) - raise(y[0]))) * (HEIGHT - TOP - BOTTOM);
  const point = (at: number, value: number) => `${place(at).toFixed(1)} ${level(value).toFixed(1)}`;
  const line = (column: number): string[] => {
    const rows = [...plot.data[0]!.keys()].filter((row) => plot.data[column]![row] != null);
    return rows.map((row) => point(plot.data[0]![row]!, plot.data[column]![row]!));
  };
  const drawn = curves.map(({ series, look }, at) => {
    const column = drawing.columns[at]!;
    const edge = banded(series) ? `<path d="M${[...line(column + 1), ...line(column + 2).reverse()].join("L")}Z" fill="${look.color}" fill-opacity=".15"/>` : "";
    return `${edge}<path d="M${line(column).join("L")}h0" fill="none" stroke-linecap="round" stroke="${look.color}" stroke-width="1.6" stroke-dasharray="${look.dash.join(" ")}"/>`;
  });
  const named = along === "clock" ? (ms: number) => new Date(ms).toLocaleString("sv").slice(5, 16) : along === "time" ? across : tick;
  const columns = linearTicks(x, 7).map((at) => `<path d="M${place(at)} ${TOP}V${HEIGHT - BOTTOM}" stroke="#e3e6ea"/><text x="${place(at)}" y="${HEIGHT - BOTTOM + 18}" text-anchor="middle">${escaped(named(at))}</text>`);
  const rows = (drawing.log ? logTicks(y, 8) : linearTicks(y, 8)).map((at) => `<path d="M${LEFT} ${level(at)}H${WIDTH - RIGHT}" stroke="#e3e6ea"/><text x="${LEFT - 8}" y="${level(at) + 4}" text-anchor="end">${escaped(tick(at))}</text>`);
  const keys = legend.map(({ label, look }, at) => {
    const top = HEIGHT + at * LINE;
    return `<path d="M${LEFT} ${top}h24" stroke="${look.color}" stroke-width="2.5" stroke-dasharray="${look.dash.join(" ")}"/><text x="${LEFT + 32}" y="${top + 4}">${escaped(label)}</text>`;
  });
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${WIDTH}" height="${height}" viewBox="0 0 ${WIDTH} ${height}" font-family="system-ui, sans-serif" font-size="12" fill="#333">`,
    `<rect width="100%" height="100%" fill="#fff"/><text x="${LEFT}" y="22" font-size="15" font-weight="600">${escaped(title)}</text>`,
    ...columns,
    ...rows,
    `<text x="${(LEFT + WIDTH - RIGHT) / 2}" y="${HEIGHT - BOTTOM + 36}" text-anchor="middle">${escaped(axisName(along))}</text>`,
    `<clipPath id="area"><rect x="${LEFT}" y="${TOP}" width="${WIDTH - LEFT - RIGHT}" height="${HEIGHT - TOP - BOTTOM}"/></clipPath><g clip-path="url(#area)">${drawn.join("")}</g>`,
    ...keys,
    "</svg>",
  ].join("\n");
}

function scaleOf(plot: uPlot, name: "x" | "y"): Range {
  const { min, max } = plot.scales[name]!;
  return [min ?? 0, max ?? 1];
}

async function png(text: string): Promise<Blob> {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = image.width * PNG_SCALE;
  canvas.height = image.height * PNG_SCALE;
  canvas.getContext("2d")!.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve, reject) => canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("the browser made no PNG file; download SVG"))), "image/png"));
}
