/** The files of the model directory that an experiment was submitted with. */

import { get, text } from "../../api";
import { bytes, number } from "../../format";
import { useLoaded } from "../../live";
import { Copy, Problem } from "../../parts";
import type { Experiment, ModelFile, ModelFilePage } from "../../resources";
import { useChoice } from "../../route";

/** Of a file that is shown; larger ones are only downloaded. */
const MOST_BYTES = 1 << 20;

export function Code({ row }: { row: Experiment }) {
  const path = `/experiments/${row.id}`;
  const list = useLoaded(`${path}/files`, () => get<ModelFilePage>(`${path}/files`).then((page) => page.files));
  const [wanted, setWanted] = useChoice("file");
  if (list.value === null) return list.error ? <Problem text={list.error} /> : <p class="muted">Loading…</p>;
  const files = list.value;
  const shown = files.find((file) => file.path === wanted) ?? first(files, String(row.config.entrypoint ?? ""));
  return (
    <section>
      <div class="choice">
        <a href={`/api/v1${path}/archive`}>all files (tar.gz)</a>
        <span class="muted">
          {number(files.length)} files, {bytes(files.reduce((sum, file) => sum + file.size_bytes, 0))}
        </span>
      </div>
      <div class="code">
        <ul class="files" aria-label="files">
          {files.map((file) => (
            <li key={file.path}>
              <button type="button" class="bare" aria-pressed={file === shown} onClick={() => setWanted(file.path)}>
                {file.path}
              </button>{" "}
              <span class="muted">{bytes(file.size_bytes)}</span>
            </li>
          ))}
        </ul>
        {shown && <Content key={shown.path} path={path} file={shown} />}
      </div>
    </section>
  );
}

/** The file that an entrypoint names, else the first. */
function first(files: ModelFile[], entrypoint: string): ModelFile | undefined {
  const words = [`${entrypoint.split(":")[0]!.replaceAll(".", "/")}.py`, ...entrypoint.split(/\s+/)];
  return files.find((file) => words.includes(file.path)) ?? files[0];
}

function Content({ path, file }: { path: string; file: ModelFile }) {
  const source = `${path}/file?name=${encodeURIComponent(file.path)}`;
  const found = useLoaded(source, () => (file.size_bytes > MOST_BYTES ? Promise.resolve(null) : text(source)));
  const there = found.value;
  const readable = there !== null && !there.includes("\0");
  return (
    <article>
      <div class="choice">
        <b>{file.path}</b>
        {readable && <Copy text={there} />}
        <a href={`/api/v1${source}`} download={file.path.split("/").at(-1)}>
          download
        </a>
      </div>
      {found.error && <Problem text={found.error} />}
      {file.size_bytes > MOST_BYTES && <p class="muted">Larger than {bytes(MOST_BYTES)}: download it to read it.</p>}
      {there !== null && !readable && <p class="muted">Binary file: download it.</p>}
      {readable && (
        <pre class="config" tabIndex={0} aria-label={`content of ${file.path}`}>
          {there}
        </pre>
      )}
    </article>
  );
}
