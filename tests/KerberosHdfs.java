import java.io.File;
import java.security.PrivilegedExceptionAction;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.permission.FsPermission;
import org.apache.hadoop.hdfs.MiniDFSCluster;
import org.apache.hadoop.minikdc.MiniKdc;
import org.apache.hadoop.security.Credentials;
import org.apache.hadoop.security.UserGroupInformation;

/**
 * A KDC, and a NameNode and a DataNode that ask for its tickets, in one process, until its standard
 * input ends.
 *
 * <p>Argument: a folder. It gets `krb5.conf`, `alice.keytab`, and `tokens`, the delegation token of
 * alice.
 */
public class KerberosHdfs {
    public static void main(String[] arguments) throws Exception {
        File folder = new File(arguments[0]);
        folder.mkdirs();
        MiniKdc kdc = new MiniKdc(MiniKdc.createConf(), folder);
        kdc.start();
        File keys = new File(folder, "hdfs.keytab");
        File alice = new File(folder, "alice.keytab");
        kdc.createPrincipal(keys, "hdfs/localhost", "HTTP/localhost");
        kdc.createPrincipal(alice, "alice");
        kdc.getKrb5conf().renameTo(new File(folder, "krb5.conf"));
        System.setProperty("java.security.krb5.conf", new File(folder, "krb5.conf").getPath());
        Configuration settings = configure("@" + kdc.getRealm(), keys.getPath());
        UserGroupInformation.setConfiguration(settings);
        UserGroupInformation.loginUserFromKeytab("hdfs/localhost", keys.getPath());
        MiniDFSCluster.Builder builder = new MiniDFSCluster.Builder(settings, new File(folder, "dfs"));
        MiniDFSCluster cluster = builder.checkDataNodeAddrConfig(true).build();
        cluster.waitActive();
        cluster.getFileSystem().setPermission(new Path("/"), new FsPermission((short) 0777));
        Credentials tokens = new Credentials();
        PrivilegedExceptionAction<Object> fetch = () ->
                FileSystem.newInstance(cluster.getURI(), settings).addDelegationTokens("alice", tokens);
        UserGroupInformation.loginUserFromKeytabAndReturnUGI("alice", alice.getPath()).doAs(fetch);
        tokens.writeTokenStorageFile(new Path("file://" + folder + "/tokens"), settings);
        System.out.println("listening on " + cluster.getNameNodePort());
        while (System.in.read() >= 0) {}
        System.exit(0);
    }

    private static Configuration configure(String realm, String keys) {
        Configuration settings = new Configuration();
        settings.set("hadoop.security.authentication", "kerberos");
        settings.setBoolean("hadoop.security.authorization", true);
        for (String node : new String[] {"namenode", "datanode"}) {
            settings.set("dfs." + node + ".kerberos.principal", "hdfs/localhost" + realm);
            settings.set("dfs." + node + ".keytab.file", keys);
        }
        settings.set("dfs.web.authentication.kerberos.principal", "HTTP/localhost" + realm);
        settings.set("dfs.web.authentication.kerberos.keytab", keys);
        settings.setBoolean("dfs.block.access.token.enable", true);
        // A DataNode that is not root's wants this, and HTTPS, which nothing here speaks.
        settings.set("dfs.data.transfer.protection", "integrity");
        settings.set("hadoop.rpc.protection", "integrity");
        settings.setBoolean("ignore.secure.ports.for.testing", true);
        settings.setInt("dfs.namenode.file.close.num-committed-allowed", 1);
        return settings;
    }
}
