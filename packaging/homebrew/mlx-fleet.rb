# Formula of a tap. `packaging/build.sh` fills in what stands between at signs, and writes dist/mlx-fleet.rb.
# It installs the installer only: Homebrew's own Python, and what Homebrew relinks, do not get between MLX and us.
class MlxFleet < Formula
  desc "Declarative control of a fleet of Macs that serve language models with MLX"
  url "@URL@"
  version "@VERSION@"
  sha256 "@SHA256@"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on "etcd" # for the machine that runs the fleet's store
  depends_on macos: :sonoma
  depends_on "uv"

  def install
    libexec.install Dir["*"]
    (bin/"mlx-fleet-install").write <<~SH
      #!/bin/sh
      exec /bin/sh "#{opt_libexec}/install.sh" --uv "#{Formula["uv"].opt_bin}/uv" "$@"
    SH
    chmod 0755, bin/"mlx-fleet-install"
  end

  def caveats
    <<~TEXT
      Install the programs, now and after each upgrade:
        sudo #{opt_bin}/mlx-fleet-install
      Before `brew uninstall mlx-fleet`, remove them:
        sudo #{opt_bin}/mlx-fleet-install --uninstall
    TEXT
  end

  test do
    assert_match "usage: install.sh", shell_output("#{bin}/mlx-fleet-install --help")
  end
end
