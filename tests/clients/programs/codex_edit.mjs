// OpenAI's coding agent Codex: a session that writes a file by a command, over /v1/responses.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const home = mkdtempSync(join(tmpdir(), "codex-"));
const config = `
model = "demo"
model_provider = "ttserve"
model_context_window = 200000

[model_providers.ttserve]
name = "ttserve"
base_url = "${process.argv[2]}"
wire_api = "responses"
`;
mkdirSync(join(home, ".codex"));
writeFileSync(join(home, ".codex", "config.toml"), config);
const program = join(process.cwd(), "node_modules", ".bin", "codex");
// Its own sandbox needs rights that containers seldom have.
const sandbox = ["--skip-git-repo-check", "--sandbox", "danger-full-access"];
const environment = { ...process.env, HOME: home, PWD: home, CODEX_HOME: join(home, ".codex") };
const options = { cwd: home, env: environment, stdio: ["ignore", "pipe", "inherit"], encoding: "utf8", timeout: 120000 };
try {
  const answer = execFileSync(program, ["exec", ...sandbox, "Save hello.txt"], options);
  assert.equal(readFileSync(join(home, "hello.txt"), "utf8"), "Hi.");
  assert.equal(answer.trim(), "It is done.");
} finally {
  rmSync(home, { recursive: true });
}
