/** A canvas that is as sharp as the screen, in the colours of the page. */

import { useEffect, useState } from "preact/hooks";

/** The width of an element, as it changes. */
export function useWidth(element: { current: HTMLElement | null }): number {
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const host = element.current!;
    const measure = () => setWidth(host.clientWidth);
    const watcher = new ResizeObserver(measure);
    watcher.observe(host);
    measure();
    return () => watcher.disconnect();
  }, []);
  return width;
}

/** Empty a canvas of so many pixels of the page, and return what draws on it. */
export function blank(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const sharp = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * sharp);
  canvas.height = Math.round(height * sharp);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d")!;
  context.setTransform(sharp, 0, 0, sharp, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
