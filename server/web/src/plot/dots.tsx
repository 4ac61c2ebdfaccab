/** Trials as dots between two axes; the mouse or the arrow keys tell which is which. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import type { Axis } from "./axis";
import { useDark } from "../theme";
import { blank, useWidth } from "./canvas";

export interface Dot {
  trial: number;
  /** From 0 to 1; null where there is no value: at the edge. */
  x: number | null;
  y: number | null;
  color: string;
  /** Filled, a ring, or a cross. */
  form: "dot" | "ring" | "cross";
  /** Whether others are looked at. */
  dim?: boolean;
  words: string;
}

interface DotsProps {
  /** What it shows, for those who do not see it. */
  title: string;
  x: Axis;
  y: Axis;
  dots: Dot[];
  height: number;
  /** Whether the dots, in their order, are steps of one line. */
  stairs?: boolean;
  pick: (trial: number) => void;
}

const PAD = { left: 64, right: 20, top: 12, bottom: 44 };
/** How far below an axis what has no value lies. */
const GAP = 0.07;
const NEAR = 14;
const MANY = 1500;

export function Dots({ title, x, y, dots, height, stairs = false, pick }: DotsProps) {
  const host = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const width = useWidth(host);
  const dark = useDark();
  const [hot, setHot] = useState<number | null>(null);
  const inner = { width: Math.max(1, width - PAD.left - PAD.right), height: height - PAD.top - PAD.bottom };
  const points = useMemo(
    () =>
      dots.map((dot) => ({
        left: PAD.left + across(dot.x, x.gaps) * inner.width,
        top: PAD.top + (1 - across(dot.y, y.gaps)) * inner.height,
      })),
    [dots, x, y, width, height],
  );
  // From left to right, as the arrow keys go.
  const order = useMemo(() => points.map((_, at) => at).sort((a, b) => points[a]!.left - points[b]!.left || points[b]!.top - points[a]!.top), [points]);
  useEffect(() => {
    if (width === 0) return;
    const context = blank(canvas.current!, width, height);
    const style = getComputedStyle(host.current!);
    if (stairs) drawStairs(context, points, style.getPropertyValue("--muted"), PAD.left + inner.width);
    const size = dots.length > MANY ? 2 : 4;
    const passes = [true, false]; // what is looked at lies above
    for (const dim of passes) dots.forEach((dot, at) => (dot.dim ?? false) === dim && draw(context, dot, points[at]!, size));
    if (hot !== null && points[hot]) {
      context.strokeStyle = style.getPropertyValue("--text");
      context.lineWidth = 2;
      ring(context, points[hot]!, size + 4);
    }
  }, [points, dots, hot, width, dark]);
  const near = (event: MouseEvent) => {
    const box = canvas.current!.getBoundingClientRect();
    const [left, top] = [event.clientX - box.left, event.clientY - box.top];
    let [found, least] = [null as number | null, NEAR];
    points.forEach((point, at) => {
      const distance = Math.hypot(point.left - left, point.top - top);
      if (distance < least) [found, least] = [at, distance];
    });
    setHot(found);
  };
  const key = (event: KeyboardEvent) => {
    const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (step && order.length > 0) {
      const at = hot === null ? (step > 0 ? -1 : order.length) : order.indexOf(hot);
      setHot(order[Math.min(order.length - 1, Math.max(0, at + step))]!);
      event.preventDefault();
    } else if (event.key === "Enter" && hot !== null) pick(dots[hot]!.trial);
    else if (event.key === "Escape") setHot(null);
  };
  return (
    <div class="plot" ref={host}>
      <div
        tabIndex={0}
        role="application"
        aria-label={`${title}: ${dots.length} dots; arrow keys select, Enter opens the trial`}
        style={{ height: `${height}px` }}
        onMouseMove={near}
        onMouseLeave={() => setHot(null)}
        onClick={() => hot !== null && pick(dots[hot]!.trial)}
        onKeyDown={key}
      >
        {width > 0 && <Frame x={x} y={y} width={width} height={height} inner={inner} />}
        <canvas ref={canvas} aria-hidden="true" />
      </div>
      <p class="readout" aria-live="polite">
        {hot !== null && dots[hot] ? dots[hot]!.words : " "}
      </p>
    </div>
  );
}

const across = (place: number | null, gaps: boolean): number => (gaps ? (place === null ? GAP / 3 : GAP + place * (1 - GAP)) : (place ?? 0));

type Point = { left: number; top: number };

function ring(context: CanvasRenderingContext2D, { left, top }: Point, size: number): void {
  context.beginPath();
  context.arc(left, top, size, 0, 2 * Math.PI);
  context.stroke();
}

function draw(context: CanvasRenderingContext2D, dot: Dot, point: Point, size: number): void {
  context.globalAlpha = dot.dim ? 0.15 : 0.9;
  context.fillStyle = dot.color;
  context.strokeStyle = dot.color;
  context.lineWidth = 1.6;
  if (dot.form === "ring") ring(context, point, size);
  else if (dot.form === "cross") {
    context.beginPath();
    for (const way of [1, -1]) {
      context.moveTo(point.left - size, point.top - way * size);
      context.lineTo(point.left + size, point.top + way * size);
    }
    context.stroke();
  } else {
    context.beginPath();
    context.arc(point.left, point.top, size, 0, 2 * Math.PI);
    context.fill();
  }
  context.globalAlpha = 1;
}

function drawStairs(context: CanvasRenderingContext2D, points: Point[], color: string, end: number): void {
  context.strokeStyle = color;
  context.lineWidth = 1.6;
  context.beginPath();
  points.forEach(({ left, top }, at) => {
    if (at === 0) context.moveTo(left, top);
    else {
      context.lineTo(left, points[at - 1]!.top);
      context.lineTo(left, top);
    }
  });
  if (points.length > 0) context.lineTo(end, points[points.length - 1]!.top);
  context.stroke();
}

interface FrameProps {
  x: Axis;
  y: Axis;
  width: number;
  height: number;
  inner: { width: number; height: number };
}

/** Axes, with their ticks and names. */
function Frame({ x, y, width, height, inner }: FrameProps) {
  const bottom = PAD.top + inner.height;
  const left = (at: number) => PAD.left + across(at, x.gaps) * inner.width;
  const top = (at: number) => PAD.top + (1 - across(at, y.gaps)) * inner.height;
  return (
    <svg width={width} height={height} aria-hidden="true" class="axes">
      {y.ticks.map(({ at, label }) => (
        <g key={at}>
          <line x1={PAD.left} x2={PAD.left + inner.width} y1={top(at)} y2={top(at)} />
          <text x={PAD.left - 6} y={top(at) + 4} text-anchor="end">
            {label.slice(0, 9)}
          </text>
        </g>
      ))}
      {x.ticks.map(({ at, label }) => (
        <g key={at}>
          <line x1={left(at)} x2={left(at)} y1={PAD.top} y2={bottom} />
          <text x={left(at)} y={bottom + 15} text-anchor="middle">
            {label}
          </text>
        </g>
      ))}
      {y.gaps && (
        <text x={PAD.left - 6} y={bottom - (GAP / 3) * inner.height + 4} text-anchor="end">
          none
        </text>
      )}
      {x.gaps && (
        <text x={PAD.left + (GAP / 3) * inner.width} y={bottom + 15} text-anchor="middle">
          none
        </text>
      )}
      <text x={PAD.left + inner.width / 2} y={height - 8} text-anchor="middle" class="title">
        {x.title}
        {x.kind === "log" && " (log)"}
      </text>
      <text x={13} y={PAD.top + inner.height / 2} text-anchor="middle" class="title" transform={`rotate(-90 13 ${PAD.top + inner.height / 2})`}>
        {y.title}
        {y.kind === "log" && " (log)"}
      </text>
    </svg>
  );
}

