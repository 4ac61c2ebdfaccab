/** Types of the media views, and their canvas. */

import { useEffect, useRef } from "preact/hooks";

import type { Media } from "../../resources";

/** Properties of the view. */
export interface MediaProps {
  /** Ids of the trials, beside each other. */
  trials: number[];
  tick: number;
  /** Show nothing, instead of a hint, where there are no media. */
  quiet?: boolean;
}

/** Media of one name in each trial. */
export interface Series {
  trial: number;
  media: Media[];
}

/** Draw on a canvas whenever what is drawn changes, in the pixels of the screen. */
export function useDrawn(draw: (canvas: CanvasRenderingContext2D, width: number, height: number) => void, inputs: unknown[]) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const node = canvas.current;
    const context = node?.getContext("2d");
    if (!node || !context) return;
    node.width = node.clientWidth * window.devicePixelRatio;
    node.height = node.clientHeight * window.devicePixelRatio;
    draw(context, node.width, node.height);
  }, inputs);
  return canvas;
}
