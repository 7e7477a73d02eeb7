package main

import (
	"errors"
	"fmt"
	"math"
	"net"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/cmd/internal/program"
	"github.com/gpushare/gpushare/pkg/deviceplugin"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/nodeconfig"
	"github.com/gpushare/gpushare/pkg/usage"
)

// options are the values of the flags.
type options struct {
	kubeconfig string
	// plugin and monitor have the fields that flags set. validate sets those that it parses from the texts below.
	plugin     deviceplugin.Options
	monitor    inventory.Options
	memoryUnit string
	cardMemory string
	isolation  string
	mpsPipes   string
	// disableHealthChecks and enableHealthChecks are lists of Xids.
	disableHealthChecks string
	enableHealthChecks  string
	healthQuietPeriod   time.Duration
	authorizeMetrics    bool
	printInventory      bool
	cleanup             bool
}

func newCommand(environment func(string) (string, bool)) *cobra.Command {
	var o options
	command := program.New(component, environment)
	command.Short = "Device plugin that shares GPU cards between pods by memory"
	command.Long = `gpushare-device-plugin reads the cards of this node from NVIDIA's driver, reports their memory to the kubelet as
aliyun.com/gpu-mem, and allocates to each container the card that was chosen for its pod.

It runs on every node that shares its cards. It keeps no state of its own: after a restart it reads it from the API
server and the kubelet's checkpoint. If the driver, the API server or the kubelet is not available, it waits and reports
this in its log and at /readyz. It exits if only a new container can help: soon after the driver was replaced while its library was
loaded, and after five minutes without the driver's library, unless --nvml-library is set, or without access to its devices.

Each flag can also be set by an environment variable with the flag's name in upper case: NODE_NAME for --node-name. The
flag takes precedence over the variable, and both over the file of --config.`
	command.RunE = func(command *cobra.Command, _ []string) error {
		if err := o.validate(); err != nil {
			return err
		}
		malformed, err := o.configure(command.Flags().Changed)
		if err != nil {
			return err
		}
		if len(malformed) > 0 {
			klog.Background().WithName(component).Error(nil, "Ignoring invalid Xids in --dp-disable-healthchecks and --dp-enable-healthchecks", "xids", malformed)
		}
		switch {
		case o.printInventory:
			return printInventory(command.Context(), command.OutOrStdout(), o)
		case o.cleanup:
			return cleanUp(command.Context(), command.OutOrStdout(), o)
		}
		return serve(command.Context(), o)
	}
	o.addFlags(command.Flags())
	command.CompletionOptions.DisableDefaultCmd = true
	command.AddCommand(newMPSCommand(environment))
	return command
}

func (o *options) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig `file`; if empty, the pod's service account is used")
	f.StringVar(&o.plugin.NodeName, "node-name", "", "`name` of this node's Node object; required except with --print-inventory")
	f.StringVar(&o.plugin.Config.Path, "config", "", "`file` with the node's configuration, or a directory of such files, of which the node's label gpushare.aliyun.com/config names one. Flags that are set override its values; changes take effect without a restart (docs/node.md)")
	f.StringVar(&o.plugin.Config.Default, "default-config", "", "`name` of the file in the directory of --config for nodes without the label; if empty, they have no file")
	f.StringVar(&o.memoryUnit, "memory-unit", gpu.GiB.String(), "amount of memory that one aliyun.com/gpu-mem stands for: GiB, MiB, or a multiple such as 256MiB. Use the same unit on all nodes, and change it only while no GPU pod runs on the node")
	f.StringVar((*string)(&o.plugin.VisibleDevices), "visible-devices", string(deviceplugin.VisibleByUUID), "identifier of a card in NVIDIA_VISIBLE_DEVICES: uuid or index; set index for software that needs indices. With index, a container that restarts after the driver has renumbered the cards can start on another card")
	f.StringVar((*string)(&o.plugin.DeviceList), "device-list-strategy", string(deviceplugin.ListByEnv), "how a container gets its card: envvar relies on NVIDIA's container runtime; cdi-cri also names a CDI device (nvidia.com/gpu=, identified as --visible-devices sets). Set cdi-cri if the runtime injects devices by CDI")
	f.StringVar(&o.isolation, "isolation", string(isolation.None), "how shares of cards are enforced (docs/limits.md): none; driver (experimental), by NVIDIA's driver for each container; or mps (experimental), by NVIDIA's Multi-Process Service for each process. The node's label gpushare.aliyun.com/isolation takes precedence")
	f.StringVar(&o.plugin.Isolation.CgroupRoot, "cgroup-root", "/sys/fs/cgroup", "`directory` of the machine's cgroups; for measured use and limits by the driver")
	f.StringSliceVar(&o.plugin.Isolation.SpecDirs, "cdi-directories", []string{"/etc/cdi", "/var/run/cdi"}, "`directories` in which the container runtime looks for CDI specifications. With --isolation=driver the plugin writes a specification into the last one")
	f.StringVar(&o.mpsPipes, "mps-pipe-directory", defaultMPSDirectory, "`directory` of the MPS daemons of the command mps, for isolation mode mps; the same path on the machine")
	f.BoolVar(&o.plugin.ErrorEnv, "compat-error-env", false, "start a container without a card if none can be allocated, with an environment that names no card, as the original gpushare plugin does; by default its pod fails")
	f.StringVar(&o.plugin.Directory, "device-plugin-dir", "/var/lib/kubelet/device-plugins", "`directory` of the kubelet's device plugin sockets and checkpoint; a constant of the kubelet, which doesn't depend on its --root-dir")
	f.StringVar(&o.plugin.PodResourcesSocket, "pod-resources-socket", "/var/lib/kubelet/pod-resources/kubelet.sock", "`socket` of the kubelet's PodResources API, which reports the pod that the kubelet is admitting; change it if the kubelet has another --root-dir. If empty or missing, the plugin infers the pod from the order of scheduling")
	f.StringVar(&o.monitor.Library, "nvml-library", "", "`path` of libnvidia-ml.so.1; if empty, the dynamic linker searches for it")
	f.StringVar(&o.monitor.SysfsRoot, "sysfs-root", "/sys", "`directory` in which sysfs is mounted, where RDMA adapters are found; if empty, none are (docs/rdma.md)")
	f.BoolVar(&o.plugin.Simulated, "simulated-cards", false, "report that the node's cards are simulated, because the driver library is the fake one of the image for trials (docs/try.md)")
	f.DurationVar(&o.healthQuietPeriod, "health-quiet-period", inventory.DefaultQuietPeriod, "`time` without failed probes and Xid errors after which an unhealthy card is used again; must be positive")
	f.StringVar(&o.cardMemory, "card-memory", "", "memory of the cards, as one `size` for all such as 96Gi, or by UUID such as GPU-…=96Gi,GPU-…=48Gi; needed for cards that share the machine's memory (such as GB10). It can't exceed the memory that the driver reports")
	f.StringVar(&o.disableHealthChecks, "dp-disable-healthchecks", "", "`Xids` that do not make a card unhealthy, such as 48,63, or all; in addition to the Xids of application errors. The format is that of NVIDIA's device plugin (DP_DISABLE_HEALTHCHECKS)")
	f.StringVar(&o.enableHealthChecks, "dp-enable-healthchecks", "", "`Xids` that make a card unhealthy, such as 31, or all; takes precedence over --dp-disable-healthchecks. The format is that of NVIDIA's device plugin (DP_ENABLE_HEALTHCHECKS)")
	f.StringVar(&o.plugin.ListenAddress, "listen-address", ":12348", "`address` of /livez, /readyz, /metrics and /version, in plain HTTP; if empty, they are not served")
	f.BoolVar(&o.authorizeMetrics, "authorize-metrics", false, "serve /metrics only to clients with a bearer token that may get the path /metrics; needs the permission to create TokenReviews and SubjectAccessReviews")
	f.DurationVar(&o.plugin.UsageInterval, "usage-interval", usage.DefaultInterval, "`time` between two measurements of the memory that each container uses. The plugin needs the host's PID namespace to find the containers of processes")
	f.StringVar(&o.plugin.UsageAddress, "usage-listen-address", "", "loopback `address` of /usage, which kubectl inspect gpushare --usage reads by port-forward; if empty, it is not served")
	f.BoolVar(&o.plugin.UsageMetrics, "usage-metrics", false, "serve the memory that each container uses on /metrics also without --authorize-metrics; these metrics name pods")
	f.Float64Var(&o.plugin.Overuse.Tolerance, "overuse-tolerance", usage.DefaultTolerance, "percentage by which a container may exceed its request before its pod is reported")
	f.DurationVar(&o.plugin.Overuse.Grace, "overuse-grace", usage.DefaultGrace, "`time` for which a container may exceed its request by more than --overuse-tolerance before its pod is reported")
	f.BoolVar(&o.cleanup, "cleanup", false, "remove aliyun.com/gpu-count, aliyun.com/gpu-core.percentage and the inventory annotation from the Node object of --node-name and exit; for nodes from which the plugin was removed. It can run on any machine")
	f.BoolVar(&o.printInventory, "print-inventory", false, "print the inventory that the plugin would write to this node's annotation, as JSON, and exit. It doesn't read the API server")
}

// configure sets the values that override the configuration file: those of the flags that were set. malformed are the words in the
// lists of Xids that are neither numbers nor "all".
func (o *options) configure(set func(flag string) bool) (malformed []string, err error) {
	unit, err := gpu.ParseUnit(o.memoryUnit)
	if err != nil {
		return nil, fmt.Errorf("--memory-unit: %w", err)
	}
	memory, err := inventory.ParseCardMemory(o.cardMemory)
	if err != nil {
		return nil, fmt.Errorf("--card-memory: %w", err)
	}
	disabled, malformed := inventory.ParseXids(o.disableHealthChecks)
	enabled, others := inventory.ParseXids(o.enableHealthChecks)
	mode, err := isolation.ParseMode(o.isolation)
	if err != nil {
		return nil, fmt.Errorf("--isolation: %w", err)
	}
	o.plugin.Config.Flags = func(s *nodeconfig.Settings) {
		for flag, apply := range map[string]func(){
			"memory-unit":             func() { s.Unit = unit },
			"card-memory":             func() { s.CardMemory = memory },
			"dp-disable-healthchecks": func() { s.Xids.Disabled = disabled },
			"dp-enable-healthchecks":  func() { s.Xids.Enabled = enabled },
			"health-quiet-period":     func() { s.QuietPeriod = o.healthQuietPeriod },
			"isolation":               func() { s.Isolation = mode },
		} {
			if set(flag) {
				apply()
			}
		}
	}
	return append(malformed, others...), nil
}

// validate checks the flags before anything is started.
func (o *options) validate() error {
	if o.printInventory {
		return nil
	}
	p := &o.plugin
	switch {
	case p.VisibleDevices != deviceplugin.VisibleByUUID && p.VisibleDevices != deviceplugin.VisibleByIndex:
		return fmt.Errorf("--visible-devices: %q is neither %s nor %s", p.VisibleDevices, deviceplugin.VisibleByUUID, deviceplugin.VisibleByIndex)
	case p.DeviceList != deviceplugin.ListByEnv && p.DeviceList != deviceplugin.ListByCDI:
		return fmt.Errorf("--device-list-strategy: %q is neither %s nor %s", p.DeviceList, deviceplugin.ListByEnv, deviceplugin.ListByCDI)
	case o.healthQuietPeriod <= 0:
		return fmt.Errorf("--health-quiet-period: must be positive, got %v", o.healthQuietPeriod)
	case p.UsageInterval <= 0:
		return fmt.Errorf("--usage-interval: must be positive, got %v", p.UsageInterval)
	case p.NodeName == "":
		return errors.New("--node-name (or NODE_NAME) is missing")
	case !filepath.IsAbs(p.Directory):
		return fmt.Errorf("--device-plugin-dir: %q is not an absolute path", p.Directory)
	case p.Overuse.Tolerance < 0 || math.IsNaN(p.Overuse.Tolerance) || math.IsInf(p.Overuse.Tolerance, 0):
		return fmt.Errorf("--overuse-tolerance: must be a number of percent that is not negative, got %v", p.Overuse.Tolerance)
	case p.Overuse.Grace < 0:
		return fmt.Errorf("--overuse-grace: must not be negative, got %v", p.Overuse.Grace)
	case !filepath.IsAbs(p.Isolation.CgroupRoot):
		return fmt.Errorf("--cgroup-root: %q is not an absolute path", p.Isolation.CgroupRoot)
	case !filepath.IsAbs(o.mpsPipes):
		return fmt.Errorf("--mps-pipe-directory: %q is not an absolute path", o.mpsPipes)
	case len(p.Isolation.SpecDirs) == 0:
		return errors.New("--cdi-directories: no directory")
	case !allAbsolute(p.Isolation.SpecDirs):
		return fmt.Errorf("--cdi-directories: %q are not all absolute paths", p.Isolation.SpecDirs)
	case p.Simulated && (o.isolation != string(isolation.None) || p.DeviceList != deviceplugin.ListByEnv):
		return errors.New("--simulated-cards: no container gets a simulated card as a device, and nothing limits its memory: use --isolation=none and --device-list-strategy=envvar")
	case p.PodResourcesSocket != "" && !filepath.IsAbs(p.PodResourcesSocket):
		return fmt.Errorf("--pod-resources-socket: %q is not an absolute path", p.PodResourcesSocket)
	case p.ListenAddress != "":
		if _, _, err := net.SplitHostPort(p.ListenAddress); err != nil {
			return fmt.Errorf("--listen-address: %w", err)
		}
	}
	p.Isolation.MPS = isolation.MPSDirectory(o.mpsPipes)
	p.UsageMetrics = p.UsageMetrics || o.authorizeMetrics
	return nil
}

func allAbsolute(paths []string) bool {
	return !slices.ContainsFunc(paths, func(path string) bool { return !filepath.IsAbs(path) })
}
