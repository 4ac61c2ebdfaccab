/** Comments on an experiment: plain text. */

import { useContext, useState } from "preact/hooks";

import { all, patch, post, remove } from "../../api";
import { Ask, Failure } from "../../dialog";
import { useLoaded } from "../../live";
import { Problem, Time } from "../../parts";
import type { Comment } from "../../resources";
import { Allowed, Caller } from "../users/access";

export function Comments({ id }: { id: number }) {
  const path = `/experiments/${id}/comments`;
  const list = useLoaded(path, () => all<Comment>(path, "comments"));
  const comments = list.value ?? [];
  return (
    <section aria-label="comments">
      <h2>Comments</h2>
      {list.error && <Problem text={list.error} />}
      {comments.map((comment) => (
        <One key={comment.id} comment={comment} done={list.reload} />
      ))}
      <Allowed>
        <Text label="new comment" usual="" deed="comment" act={(text) => post(path, { text }).then(list.reload)} />
      </Allowed>
    </section>
  );
}

function One({ comment, done }: { comment: Comment; done: () => void }) {
  const caller = useContext(Caller);
  const [editing, setEditing] = useState(false);
  const path = `/comments/${comment.id}`;
  const save = (text: string) => patch(path, { text }).then(() => (setEditing(false), done()));
  const own = comment.author === caller?.user;
  return (
    <article aria-label={`comment ${comment.id}`}>
      <p class="muted">
        <b>{comment.author}</b> <Time at={comment.created_at} />
        {comment.edited_at !== null && ", edited"}{" "}
        {own && (
          <button type="button" class="bare" onClick={() => setEditing(!editing)}>
            edit
          </button>
        )}
        {(own || caller?.role === "admin") && (
          <Ask act={() => remove(path).then(done)} final title={`delete comment ${comment.id}?`} ask="This cannot be undone.">
            delete
          </Ask>
        )}
      </p>
      {editing ? <Text label={`comment ${comment.id}`} usual={comment.text} deed="save" act={save} /> : <p class="notes">{comment.text}</p>}
    </article>
  );
}

interface TextProps {
  label: string;
  /** Initial text. */
  usual: string;
  deed: string;
  act: (text: string) => Promise<unknown>;
}

function Text({ label, usual, deed, act }: TextProps) {
  const [text, setText] = useState(usual);
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const submit = (event: Event) => {
    event.preventDefault();
    setBusy(true);
    setProblem("");
    act(text)
      .then(
        () => setText(""),
        (failed: Error) => setProblem(failed.message),
      )
      .finally(() => setBusy(false));
  };
  return (
    <form onSubmit={submit}>
      <textarea required readOnly={busy} maxLength={10_000} rows={3} aria-label={label} value={text} onInput={(e) => setText(e.currentTarget.value)} />
      {problem && <Failure text={problem} />}
      <p>
        <button type="submit" disabled={busy}>
          {deed}
        </button>
      </p>
    </form>
  );
}
