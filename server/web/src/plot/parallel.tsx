/** Parallel coordinates: each trial is a line across the axes; a brush on an axis keeps some of them. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import type { Value } from "../columns";
import { type Axis, written } from "./axis";
import { useDark } from "../theme";
import { blank, useWidth } from "./canvas";

export interface Line {
  trial: number;
  cells: Value[];
  color: string;
  dash: number[];
  /** Whether a condition leaves it out. */
  out: boolean;
  words: string;
}

/** A part of an axis, from 0 to 1. */
export type Brush = [number, number];

interface ParallelProps {
  title: string;
  axes: Axis[];
  /** What stands above them. */
  heads: string[];
  lines: Line[];
  /** What is kept of each axis; null where all is. */
  brushes: (Brush | null)[];
  brush: (axis: number, brush: Brush | null) => void;
  /** Change between a linear and a logarithmic axis. */
  flip: (axis: number) => void;
  pick: (trial: number) => void;
}

const HEIGHT = 340;
const PAD = { left: 60, right: 70, top: 40, bottom: 18 };
const GAP = 0.08;
const GRIP = 22;
const NEAR = 8;
const LEAST_AXIS = 130;
/** Characters; of a longer one both ends are shown. */
const LONGEST_HEAD = 20;
const MANY = 300;

const inside = HEIGHT - PAD.top - PAD.bottom;
const topOf = (place: number | null, gaps: boolean): number =>
  PAD.top + inside * (1 - (gaps ? (place === null ? GAP / 3 : GAP + place * (1 - GAP)) : (place ?? 0)));
const placeAt = (top: number, gaps: boolean): number => {
  const at = 1 - (top - PAD.top) / inside;
  return Math.min(1, Math.max(0, gaps ? (at - GAP) / (1 - GAP) : at));
};

export function Parallel({ title, axes, heads, lines, brushes, brush, flip, pick }: ParallelProps) {
  const host = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const above = useRef<HTMLCanvasElement>(null); // the one that is looked at: the others need not be drawn again
  const room = useWidth(host);
  const width = Math.max(room, axes.length * LEAST_AXIS);
  const dark = useDark();
  const [hot, setHot] = useState<number | null>(null);
  const left = (axis: number) => PAD.left + (axes.length < 2 ? 0 : (axis * (width - PAD.left - PAD.right)) / (axes.length - 1));
  const tops = useMemo(() => lines.map((line) => axes.map((axis, at) => topOf(axis.place(line.cells[at]!), axis.gaps))), [lines, axes]);
  useEffect(() => {
    if (room === 0) return;
    const context = blank(canvas.current!, width, HEIGHT);
    const muted = getComputedStyle(host.current!).getPropertyValue("--muted");
    const count = lines.filter((line) => !line.out).length;
    const strong = count > 10 * MANY ? 0.12 : count > MANY ? 0.35 : 0.8;
    lines.forEach((line, at) => line.out && stroke(context, at, muted, 0.08, 1));
    lines.forEach((line, at) => !line.out && stroke(context, at, line.color, strong, 1.3));
  }, [lines, tops, width, room, dark]);
  useEffect(() => {
    if (room === 0) return;
    const context = blank(above.current!, width, HEIGHT);
    if (hot !== null && lines[hot]) stroke(context, hot, lines[hot]!.color, 1, 3.5);
  }, [lines, tops, width, room, hot]);
  const stroke = (context: CanvasRenderingContext2D, at: number, color: string, alpha: number, wide: number) => {
    context.globalAlpha = alpha;
    context.strokeStyle = color;
    context.lineWidth = wide;
    context.setLineDash(lines[at]!.dash);
    context.beginPath();
    tops[at]!.forEach((top, axis) => (axis === 0 ? context.moveTo(left(0), top) : context.lineTo(left(axis), top)));
    context.stroke();
  };
  const kept = lines.map((_, at) => at).filter((at) => !lines[at]!.out);
  const near = (event: MouseEvent) => {
    const box = canvas.current!.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const first = Math.min(axes.length - 2, Math.max(0, Math.floor((x - left(0)) / Math.max(1, left(1) - left(0)))));
    const part = (x - left(first)) / Math.max(1, left(first + 1) - left(first));
    let [found, least] = [null as number | null, NEAR];
    for (const at of kept) {
      const [a, b] = [tops[at]![first]!, tops[at]![first + 1] ?? tops[at]![first]!];
      const distance = Math.abs(a + part * (b - a) - y);
      if (distance < least) [found, least] = [at, distance];
    }
    setHot(found);
  };
  const key = (event: KeyboardEvent) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.target !== event.currentTarget) return; // a handle's own
    if (step && kept.length > 0) {
      const at = hot === null ? (step > 0 ? -1 : kept.length) : kept.indexOf(hot);
      setHot(kept[Math.min(kept.length - 1, Math.max(0, at + step))]!);
      event.preventDefault();
    } else if (event.key === "Enter" && hot !== null) pick(lines[hot]!.trial);
    else if (event.key === "Escape") setHot(null);
  };
  return (
    <div class="plot" ref={host}>
      <div class="scroll">
        <div
          tabIndex={0}
          role="application"
          aria-label={`${title}: ${lines.length} trials on ${axes.length} axes, ${kept.length} kept; arrow keys select, Enter opens the trial`}
          style={{ height: `${HEIGHT}px`, width: `${width}px` }}
          onMouseMove={near}
          onMouseLeave={() => setHot(null)}
          onKeyDown={key}
          onClick={(event) => (event.target as Element).tagName === "CANVAS" && hot !== null && pick(lines[hot]!.trial)}
        >
          <canvas ref={canvas} aria-hidden="true" />
          <canvas ref={above} aria-hidden="true" />
          <svg width={width} height={HEIGHT} class="axes over">
            {axes.map((axis, at) => (
              <Rule key={axis.column} axis={axis} head={heads[at]!} left={left(at)} brush={brushes[at] ?? null} set={(next) => brush(at, next)} flip={() => flip(at)} />
            ))}
          </svg>
        </div>
      </div>
      <p class="readout" aria-live="polite">
        {hot !== null && lines[hot] ? lines[hot]!.words : " "}
      </p>
    </div>
  );
}

interface RuleProps {
  axis: Axis;
  head: string;
  left: number;
  brush: Brush | null;
  set: (brush: Brush | null) => void;
  flip: () => void;
}

/** An axis, what is kept of it, and two handles that the arrow keys move. */
function Rule({ axis, head, left, brush, set, flip }: RuleProps) {
  const start = useRef<number | null>(null);
  const [drawn, setDrawn] = useState<Brush | null>(null);
  const shown = drawn ?? brush;
  const at = (event: PointerEvent) => placeAt(event.clientY - (event.currentTarget as Element).closest("svg")!.getBoundingClientRect().top, axis.gaps);
  const down = (event: PointerEvent) => {
    start.current = at(event);
    (event.currentTarget as Element).setPointerCapture(event.pointerId);
    event.preventDefault();
  };
  const move = (event: PointerEvent) => {
    if (start.current === null) return;
    const now = at(event);
    setDrawn([Math.min(start.current, now), Math.max(start.current, now)]);
  };
  const up = (event: PointerEvent) => {
    if (start.current === null) return;
    const now = at(event);
    const [low, high] = [Math.min(start.current, now), Math.max(start.current, now)];
    start.current = null;
    setDrawn(null);
    if (high - low > 0.02) set([low, high]);
    else if (axis.kind === "category") set(around(axis, now));
    else set(null);
  };
  const top = (place: number) => topOf(place, axis.gaps);
  const latest = useRef(brush);
  latest.current = brush;
  const handle = (which: 0 | 1) => {
    const [low, high] = brush ?? [0, 1];
    const key = (event: KeyboardEvent) => {
      const [low, high] = latest.current ?? [0, 1]; // keys may come faster than the page is drawn
      const size = axis.kind === "category" ? 1 / axis.values.length : event.shiftKey ? 0.1 : 0.02;
      const step = { ArrowUp: size, ArrowRight: size, ArrowDown: -size, ArrowLeft: -size }[event.key];
      if (event.key === "Escape" || event.key === "Delete") set(null);
      else if (step) {
        const next = Math.min(1, Math.max(0, (which === 0 ? low : high) + step));
        const [from, to] = which === 0 ? [Math.min(next, high), high] : [low, Math.max(next, low)];
        latest.current = from <= 0 && to >= 1 ? null : [from, to];
        set(latest.current);
        event.preventDefault();
      }
    };
    const place = which === 0 ? low : high;
    return (
      <rect
        key={which}
        class="handle"
        x={left - 8}
        y={top(place) - 3}
        width="16"
        height="6"
        rx="2"
        tabindex={0}
        role="slider"
        aria-label={`${axis.title}, ${which === 0 ? "from" : "to"}`}
        aria-orientation="vertical"
        aria-valuemin={0}
        aria-valuemax={100}
        aria-valuenow={Math.round(100 * place)}
        aria-valuetext={written(axis.value(Math.min(0.999, place)))}
        onKeyDown={key}
      />
    );
  };
  return (
    <g>
      <line x1={left} x2={left} y1={PAD.top} y2={HEIGHT - PAD.bottom} class="rule" />
      {axis.ticks.map(({ at: place, label }) => (
        <text key={place} x={left + 8} y={top(place) + 4}>
          {label}
        </text>
      ))}
      {axis.gaps && (
        <text x={left + 8} y={topOf(null, true) + 4}>
          none
        </text>
      )}
      <text x={left} y={14} text-anchor="middle" class="title">
        <title>{axis.title}</title>
        {head.length > LONGEST_HEAD ? `${head.slice(0, LONGEST_HEAD / 2)}…${head.slice(1 - LONGEST_HEAD / 2)}` : head}
      </text>
      {axis.kind !== "category" && (
        <text
          x={left}
          y={29}
          text-anchor="middle"
          class="flip"
          tabindex={0}
          role="button"
          aria-label={`${axis.title}: ${axis.kind} axis, change`}
          onClick={flip}
          onKeyDown={(event) => event.key === "Enter" && flip()}
        >
          {axis.kind}
        </text>
      )}
      {shown && <rect class="brush" x={left - 7} width="14" y={top(shown[1])} height={Math.max(2, top(shown[0]) - top(shown[1]))} rx="2" />}
      <rect
        class="grip"
        data-axis={axis.column}
        x={left - GRIP / 2}
        width={GRIP}
        y={PAD.top}
        height={inside}
        onPointerDown={down}
        onPointerMove={move}
        onPointerUp={up}
      />
      {([0, 1] as const).map(handle)}
    </g>
  );
}

/** The part of an axis that one category takes. */
function around(axis: Axis, place: number): Brush {
  const count = axis.values.length;
  const at = Math.min(count - 1, Math.floor(place * count));
  return [at / count, (at + 1) / count];
}
