// Anthropic's coding agent Claude Code: a session that writes a file by its tool, over /v1/messages.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const home = mkdtempSync(join(tmpdir(), "claude-"));
const program = join(process.cwd(), "node_modules", "@anthropic-ai", "claude-code", "cli-wrapper.cjs");
const environment = {
  ...process.env,
  HOME: home,
  PWD: home,
  ANTHROPIC_BASE_URL: process.argv[2].replace(/\/v1$/, ""),
  ANTHROPIC_AUTH_TOKEN: "none",
  ANTHROPIC_MODEL: "demo",
  ANTHROPIC_DEFAULT_HAIKU_MODEL: "demo",
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
};
const options = { cwd: home, env: environment, stdio: ["ignore", "pipe", "inherit"], encoding: "utf8", timeout: 120000 };
try {
  const session = [program, "--print", "--permission-mode", "acceptEdits", "Create hello.txt"];
  const answer = execFileSync("node", session, options);
  assert.equal(readFileSync(join(home, "hello.txt"), "utf8"), "Hi.");
  assert.equal(answer.trim(), "It is done.");
} finally {
  rmSync(home, { recursive: true });
}
